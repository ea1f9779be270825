"use strict";
// --- graph of a block
// equal stages of a pipeline are one group; names of ops are unique in one
const staged = D.groups.length > 1;
const groupName = (group) => D.groups[group].name;
const byName = D.groups.map(() => new Map());
for (const op of D.ops) byName[op.group].set(op.name, op);
const cost = (op) => op.compute_s * op.times + op.moves.reduce((sum, m) => sum + m[3] * m[4], 0);
function tensorOf(op) {
  const { ranks } = D.groups[op.group], of = staged ? ` of ${groupName(op.group)}` : "";
  return { label: op.name + of, shape: op.shapes[0] || [], layout: op.outputs[0] || [], mode: op.op, bytes: 0, ranks, own: ranks.length > 1 };
}
function showOp(op) {
  if (!op.outputs.length) return;
  showTensor(tensorOf(op));
  $("holds").scrollIntoView();
}
function movesText(op) {
  return op.moves.map(([axis, kind, size, times, s, of, , pieces]) => `${kind.replaceAll("_", "-")} on ${D.axes[axis]}${of ? ` of ${of}` : ""}: ${bytes(size)}${times > 1 ? ` × ${times}` : ""}${pieces > 1 ? ` in ${pieces} pieces` : ""}, ${seconds(s * times)}`).join("\n");
}
function fillGraphControls() {
  const blocks = new Map();
  for (const op of D.ops) {
    const key = blockKey(op), known = blocks.get(key) || { op, times: 1, count: 0 };
    blocks.set(key, { op, times: Math.max(known.times, op.instances), count: known.count + 1 });
  }
  const select = $("graph-block");
  const entries = [...blocks].sort(([, a], [, b]) => b.times - a.times || b.count - a.count);
  for (const [key, { op, times, count }] of entries) {
    const where = `${staged ? `${groupName(op.group)}: ` : ""}${op.block || "outside of blocks"}`;
    select.append(el("option", { value: key }, `${where}${times > 1 ? ` (stands for ${times})` : ""}, ${count} ops`));
  }
  for (const phase of ["forward", "recompute", "backward"]) if (D.ops.some((op) => op.phase === phase)) $("graph-phase").append(el("option", { value: phase }, phase));
  for (const id of ["graph-block", "graph-phase", "graph-views"]) $(id).addEventListener("change", drawGraph);
}
const blockKey = (op) => `${op.group}:${op.block}`;
function behindViews(name, ops) {
  for (let op = ops.get(name); op && op.class === "view" && op.operands.length; op = ops.get(name)) name = op.operands[0];
  return name;
}
function drawGraph() {
  const views = $("graph-views").checked;
  const ops = D.ops.filter((op) => blockKey(op) === $("graph-block").value && op.phase === $("graph-phase").value && (views || op.class !== "view")).slice(0, 600);
  const source = (name, op) => (views ? name : behindViews(name, byName[op.group]));
  const { lines, width } = lanes(ops.map((op) => op.name), ops.map((op) => op.operands.map((name) => source(name, op))));
  const host = el("div");
  ops.forEach((op) => host.append(graphRow(op, width)));
  host.prepend(lines);
  $("graph-rows").replaceChildren(ops.length ? host : el("p", { class: "note" }, "No ops here."));
}
const placesText = (inputs, outputs) => `${inputs.map(layoutText).join(" × ") || "–"} → ${outputs.map(layoutText).join(", ")}`;
const shortOp = (op) => op.op.split(".").slice(-2)[0] || op.op;
function graphRow(op, width) {
  const given = op.inputs.map(layoutText).join(" × ") || "–", made = op.outputs.map(layoutText).join(", ");
  const known = byName[op.group];
  const weights = op.operands.map((name) => behindViews(name, known)).filter((name) => !known.has(name) && name.includes(".")).map((name) => name.split(".").slice(-2).join("."));
  const source = op.source.split("/").slice(-1)[0];
  const chips = op.moves.map(([axis, kind, size]) => `${kind.replaceAll("_", "-")} ${D.axes[axis]} ${bytes(size)}`);
  const detail = [weights.join(", "), source, `[${(op.shapes[0] || []).join(", ")}]`].filter(Boolean).join(" · ");
  return el("div", { class: "row", style: `padding-left:${width}px`, onclick: () => showOp(op),
      title: `${op.name}: ${op.op}\n${op.module}\n${op.source}\n${given} → ${made}\n${movesText(op)}` },
    el("div", {}, el("div", { class: "a" }, el("span", { class: "mono" }, shortOp(op)), " ", el("span", { class: "place mono" }, `${given} → ${made}`)),
      el("div", { class: "b" }, ...(chips.length ? [el("span", { class: "chip" }, chips.join(", ")), " · "] : []), detail)),
    el("div", { class: "t" }, seconds(cost(op) / op.times)));
}

// --- table of ops
const COLUMNS = [
  ["Op", (op) => op.name, "30%", ""], ...(staged ? [["Stage", (op) => op.group, "64px", ""]] : []),
  ["Module and source", (op) => op.module, staged ? "22%" : "26%", "wide"],
  ["Result", (op) => op.outputs.map(layoutText).join(), staged ? "16%" : "18%", ""], ["Times", (op) => op.times, "62px", "n wide"],
  ["Compute", (op) => op.compute_s * op.times, "86px", "n"], ["Comm.", (op) => cost(op) - op.compute_s * op.times, "86px", "n"],
  ["Total", cost, "86px", "n"], ["Runner-up", (op) => (op.more_s === null ? Infinity : op.more_s), "150px", "n"],
];
const numbers = COLUMNS.findIndex((column) => column[0] === "Times");
let order = { column: numbers + 3, down: true }, limit = 60;
function drawOps() {
  const words = $("op-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const group = $("op-stage").value;
  const found = D.ops.filter((op) => (!group || op.group === +group) && words.every((word) => op.text.includes(word)));
  const key = COLUMNS[order.column][1], sign = order.down ? -1 : 1;
  found.sort((a, b) => { const x = key(a), y = key(b); return x < y ? -sign : x > y ? sign : 0; });
  const more = (s) => (s ? "+" + seconds(s) : "no slower");
  const small = (s) => (s ? seconds(s) : "–");
  const rows = found.slice(0, limit).map((op) => el("tr", { onclick: () => showOp(op), title: movesText(op) },
    el("td", {}, el("span", { class: "mono" }, op.name), el("small", {}, `${op.op}, ${op.phase}`)),
    ...(staged ? [el("td", {}, D.groups[op.group].label)] : []),
    el("td", { class: "wide" }, op.module || "–", el("small", {}, op.source || "no source line is known")),
    el("td", { class: "mono" }, op.outputs.map(layoutText).join(", ")),
    el("td", { class: "n wide" }, String(op.times)), el("td", { class: "n" }, small(op.compute_s * op.times)),
    el("td", { class: "n" }, small(cost(op) - op.compute_s * op.times)), el("td", { class: "n" }, small(cost(op))),
    el("td", { class: "n" }, op.more_s === null ? "none" : more(op.more_s), el("small", { class: "mono" }, op.other.length ? placesText(...op.other) : ""))));
  $("op-table").tBodies[0].replaceChildren(...rows);
  const computed = found.reduce((sum, op) => sum + op.compute_s * op.times, 0), all = found.reduce((sum, op) => sum + cost(op), 0);
  $("op-count").textContent = `${found.length} of ${D.ops.length} ops: compute ${seconds(computed)}, communication ${seconds(Math.max(0, all - computed))}`;
  $("op-more").hidden = found.length <= limit;
  [...$("op-table").tHead.rows[0].cells].forEach((cell, i) => cell.setAttribute("aria-sort", i !== order.column ? "none" : order.down ? "descending" : "ascending"));
}
function fillOps() {
  for (const op of D.ops) op.text = [op.name, op.op, op.class, op.phase, op.module, op.source, ...op.outputs.map(layoutText), ...op.moves.map((m) => m[1]), ...op.operands.filter((name) => name.includes("."))].join(" ").toLowerCase();
  COLUMNS.forEach(([name, , width, cls], column) => $("op-table").tHead.rows[0].append(el("th", { class: cls, style: `width:${width}`, scope: "col", onclick: () => {
    order = { column, down: order.column === column ? !order.down : column >= numbers };
    drawOps();
  } }, name)));
  D.groups.forEach((_, group) => $("op-stage").append(el("option", { value: String(group) }, groupName(group))));
  $("op-stage").parentElement.hidden = !staged;
  $("op-stage").addEventListener("change", () => { limit = 60; drawOps(); });
  $("op-search").addEventListener("input", () => { limit = 60; drawOps(); });
  $("op-more").addEventListener("click", () => { limit += 240; drawOps(); });
  drawOps();
}
