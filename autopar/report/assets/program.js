"use strict";
// --- what a rank runs for a block: nodes of the emitted program, as core/excerpt.py keeps them
const KINDS = {
  op: ["ops", "matmul"], kernel: ["fused kernels", "attention"], collective: ["collectives", "comm"],
  wait: ["waits", "transient"], copy: ["copies with host memory", "host"], view: ["views", "view"],
};
const PARTS = { prepare: "prepare, once", forward: "forward", input: "backward, towards the input", backward: "backward", weight: "backward, of weights", finish: "finish, once" };
const texts = D.program.strings || [];
const programs = (D.program.blocks || []).map(([block, count, stages, rows, given], index) => {
  const others = given.map((n) => texts[n]);
  const from = new Map(others.flatMap((name, i) => (i % 2 ? [] : [[name, others[i + 1]]])));
  return { block: texts[block], count, stages, index, from, group: D.program.groups[index], label: D.program.labels[index], nodes: rows.map(emitted) };
});
function emitted([name, target, value, kind, part, origin, woven, seconds, hidden, sent, inside]) {
  const words = woven.map((n) => texts[n]);
  const sends = sent && sent.length ? { kind: texts[sent[0]], axis: sent[1], bytes: sent[2], piece: texts[sent[3]], members: sent.slice(4).map((n) => texts[n]) } : null;
  return { name: texts[name], target: texts[target], value: texts[value], kind: texts[kind], part: texts[part], origin: texts[origin], words,
    operands: words.filter((_, i) => i % 2), seconds, hidden, sends, inside: (inside || []).map((n) => texts[n]) };
}
for (const program of programs) {
  program.byName = new Map(program.nodes.map((node) => [node.name, node]));
  program.readers = new Map();
  for (const node of program.nodes) for (const name of new Set(node.operands)) program.readers.set(name, [...(program.readers.get(name) || []), node.name]);
}
let running = null, chosenNode = null;
const shortTarget = (node) => node.target.replace(/^(aten|autopar|autopar_kernels|_c10d_functional|prims)\./, "");
const sendsText = ({ kind, axis, bytes: size, piece }) => `${kind.replaceAll("_", "-")} on ${D.axes[axis]}, ${bytes(size)}${piece ? `, piece ${piece}` : ""}`;
const plannedOf = (node) => byName[running.group].get(node.origin);
function fillProgramControls() {
  const select = $("program-block");
  const entries = [...programs].sort((a, b) => !a.block - !b.block || b.count - a.count);
  for (const { block, count, label, nodes, index } of entries) {
    const stands = block && count > 1 ? ` (${count} blocks run the same)` : "";
    select.append(el("option", { value: String(index) }, `${label ? `${label}: ` : ""}${block || "outside of blocks"}${stands}, ${nodes.length} nodes`));
  }
  select.addEventListener("change", () => openProgram(+select.value));
  for (const id of ["program-part", "program-views"]) $(id).addEventListener("change", drawProgram);
  openProgram(entries[0].index);
}
function openProgram(index) {
  running = programs[index];
  $("program-block").value = String(index);
  const now = $("program-part").value, present = Object.keys(PARTS).filter((part) => running.nodes.some((node) => node.part === part));
  $("program-part").replaceChildren(...present.map((part) => el("option", { value: part }, PARTS[part])));
  $("program-part").value = present.includes(now) ? now : present.includes("forward") ? "forward" : present[0];
  chosenNode = null;
  drawProgram();
}
function throughViews(name) {
  for (let node = running.byName.get(name); node && node.kind === "view" && node.operands.length; node = running.byName.get(name)) name = node.operands[0];
  return name;
}
function drawProgram() {
  const views = $("program-views").checked, part = $("program-part").value;
  const whole = running.nodes.filter((node) => node.part === part), most = 800;
  const all = whole.filter((node) => views || node.kind !== "view"), nodes = all.slice(0, most);
  const source = (name) => (views ? name : throughViews(name));
  const { lines, width } = lanes(nodes.map((node) => node.name), nodes.map((node) => node.operands.map(source)));
  const host = el("div");
  host.append(lines, ...nodes.map((node) => programRow(node, width)));
  const left = all.length > most ? [el("p", { class: "note" }, `${all.length - most} more nodes are not drawn.`)] : [];
  $("program-rows").replaceChildren(nodes.length ? host : el("p", { class: "note" }, "Nothing but views."), ...left);
  const counts = Object.entries(KINDS).map(([kind, [name, tint]]) => [name, tint, whole.filter((node) => node.kind === kind).length]).filter((row) => row[2]);
  $("program-legend").replaceChildren(...counts.map(([name, tint, count]) => el("span", {}, el("i", { style: `background:${color(tint)}` }), `${name}: ${count}`)));
  const sum = (found) => found.reduce((total, node) => total + node.seconds, 0);
  const sent = whole.filter((node) => node.sends), copies = whole.filter((node) => node.kind === "copy");
  const beside = [...sent, ...copies].reduce((total, node) => total + node.hidden, 0);
  const size = sent.reduce((total, node) => total + node.sends.bytes, 0);
  $("program-text").textContent = `Compute ${seconds(sum(whole) - sum(sent) - sum(copies))}`
    + (sent.length ? `; communication ${seconds(sum(sent))}, ${bytes(size)}` : "") + (copies.length ? `; copies ${seconds(sum(copies))}` : "")
    + (beside ? `; of these ${seconds(beside)} beside compute` : "") + ": of one execution, as simulated.";
  const kept = chosenNode && running.byName.get(chosenNode);
  chooseNode(kept && kept.part === part ? chosenNode : (nodes[0] || whole[0]).name, false);
}
function programRow(node, width) {
  const op = plannedOf(node), source = op ? op.source.split("/").slice(-1)[0] : "";
  const own = op && running.block && op.module.startsWith(running.block + ".") ? op.module.slice(running.block.length + 1) : op && op.module;
  const detail = [node.value, op ? own : node.origin.replace(running.block + ".", ""), source].filter(Boolean).join(" · ");
  const row = el("div", { class: "row", tabindex: "0", style: `padding-left:${width}px`, onclick: () => chooseNode(node.name, false),
      onkeydown: (event) => { if (event.key === "Enter") chooseNode(node.name, false); } },
    el("div", {}, el("div", { class: "a" }, el("i", { class: "dot", style: `background:${color(KINDS[node.kind][1])}` }), el("span", { class: "mono" }, shortTarget(node)), " ", el("span", { class: "place mono" }, node.name)),
      el("div", { class: "b" }, ...(node.sends ? [el("span", { class: "chip" }, sendsText(node.sends)), " · "] : []), detail)),
    el("div", { class: "t" }, node.seconds ? seconds(node.seconds) : ""));
  row.node = node;
  return row;
}
// --- one node: its call, whose operands can be followed, and who reads it
function chooseNode(name, follow) {
  chosenNode = name;
  for (const row of $("program-rows").querySelectorAll(".row")) {
    const found = row.node.name === name, near = running.byName.get(name).operands.includes(row.node.name);
    row.classList.toggle("chosen", found);
    row.classList.toggle("near", near || row.node.operands.includes(name));
    if (found && follow) row.scrollIntoView({ block: "nearest" });
  }
  fillNode(running.byName.get(name));
}
function followNode(name, program = running) {
  if (program !== running) openProgram(program.index);
  const node = running.byName.get(name);
  if (node.part !== $("program-part").value) {
    $("program-part").value = node.part;
    chosenNode = name;
    drawProgram();
  }
  chooseNode(name, true);
}
// a name of another block of the same program
const elsewhere = (name) => programs.find((other) => other !== running && other.stages[0] === running.stages[0] && other.byName.has(name));
function nameLink(name) {
  const other = running.byName.has(name) ? running : elsewhere(name);
  if (!other) return el("span", { class: "mono", title: running.from.get(name) || "" }, name);
  return el("button", { type: "button", class: "link mono", title: running.from.get(name) || other.byName.get(name).value, onclick: () => followNode(name, other) }, name);
}
function fillNode(node) {
  const op = plannedOf(node), rows = [];
  const add = (name, ...what) => rows.push(el("dt", {}, name), el("dd", {}, ...what));
  const listed = (names) => names.flatMap((name, i) => (i ? [", ", nameLink(name)] : [nameLink(name)]));
  add("yields", el("span", { class: "mono" }, node.value || "nothing"));
  if (node.sends) add("sends", sendsText(node.sends));
  if (node.sends && node.sends.members.length) add("bucket of", ...node.sends.members.flatMap((name, i) => (i ? [el("br"), name] : [name])));
  if (node.inside.length) add("fused ops", el("span", { class: "mono" }, node.inside.join(", ")));
  if (node.seconds) add("takes", `${seconds(node.seconds)}${node.hidden ? `, ${seconds(node.hidden)} of it beside compute` : ""}`);
  const readers = programs.filter((other) => other === running || other.stages[0] === running.stages[0]).flatMap((other) => other.readers.get(node.name) || []);
  add("read by", ...(readers.length ? listed(readers) : ["nothing that is shown"]));
  const given = [...new Set([...node.operands, ...node.operands.map(throughViews)])].filter((name) => running.from.has(name));
  for (const name of given) add("reads", nameLink(name), ` ${running.from.get(name)}`);
  if (op) {
    add("for", el("button", { type: "button", class: "link mono", title: "show who holds its result", onclick: () => showOp(op) }, op.name), ` ${op.op}`);
    if (op.module) add("module", op.module);
    if (op.source) add("source", op.source);
    add("placements", el("span", { class: "mono" }, placesText(op.inputs, op.outputs)));
  } else if (node.origin) add("for", node.origin);
  const call = el("p", { class: "call mono" }, `${node.name} = ${node.target}(`, ...node.words.map((word, i) => (i % 2 ? nameLink(word) : word)), ")");
  $("program-node").replaceChildren(call, el("dl", {}, ...rows));
}
