"use strict";
// --- memory over time
const memoryView = () => D.memory.views[+$("memory-view").value || 0];
const isNear = () => D.limit && D.peak > 0.4 * D.limit;
// "F 3 0" is a forward of stage 3 for microbatch 0; an op is named as it is
function momentText(name) {
  const [kind, stage, microbatch] = name.split(" ");
  if (microbatch === undefined) return name ? ` at ${name}` : "";
  return `: ${ACTIONS[kind][0]}, stage ${stage}${kind === "P" || kind === "R" ? "" : `, microbatch ${microbatch}`}`;
}
function drawMemory(width) {
  const host = $("memory-svg"), { kinds, table, names, views } = D.memory;
  if (!views.length) { $("memory-text").textContent = "The plan has no timeline."; return; }
  const { rows, names: named, backward_s, seconds: length, rank } = memoryView();
  const near = isNear();
  const top = (near ? Math.max(D.limit, D.peak) : D.peak) * 1.04, h = 250, left = 86, w = width - left - 6, bottom = 26;
  const filled = [];
  rows.forEach((row, i) => filled.push(row >= 0 ? table[row] : filled[i - 1] || kinds.map(() => 0)));
  const x = (i) => left + (i / filled.length) * w, y = (v) => 8 + (1 - v / top) * h;
  const root = svg("svg", { width, height: h + bottom + 8, role: "img", "aria-label": "Live memory by kind over the step" });
  for (let i = 0; i <= 4; i++) {
    const value = (top / 1.04) * (i / 4);
    root.append(svg("line", { x1: left, x2: left + w, y1: y(value), y2: y(value), style: "stroke:var(--line)" }), svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, bytes(value)));
  }
  let base = filled.map(() => 0);
  kinds.forEach((kind, k) => {
    const next = filled.map((row, i) => base[i] + row[k]);
    let d = "";
    next.forEach((v, i) => { d += `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}L${x(i + 1).toFixed(1)} ${y(v).toFixed(1)}`; });
    for (let i = base.length - 1; i >= 0; i--) d += `L${x(i + 1).toFixed(1)} ${y(base[i]).toFixed(1)}L${x(i).toFixed(1)} ${y(base[i]).toFixed(1)}`;
    root.append(svg("path", { d: d + "Z", style: `fill:${color(kind)}` }));
    base = next;
  });
  if (near) {
    root.append(svg("line", { x1: left, x2: left + w, y1: y(D.limit), y2: y(D.limit), style: "stroke:var(--text);stroke-dasharray:5 4" }));
    root.append(svg("text", { x: left + w - 4, y: y(D.limit) + 15, "text-anchor": "end", style: "fill:var(--text);paint-order:stroke;stroke:var(--panel);stroke-width:3px" }, "limit"));
  }
  const time = (s) => left + (s / length) * w;
  root.append(svg("text", { x: left, y: h + 26 }, "0"), svg("text", { x: left + w, y: h + 26, "text-anchor": "end" }, seconds(length)));
  if (backward_s) {
    root.append(svg("line", { x1: time(backward_s), x2: time(backward_s), y1: 8, y2: h + 14, style: "stroke:var(--muted)" }));
    root.append(svg("text", { x: time(backward_s) + 5, y: h + 26 }, "backward"));
  }
  const cursor = svg("line", { y1: 8, y2: h + 8, style: "stroke:var(--text)", visibility: "hidden" });
  root.append(cursor);
  root.addEventListener("mousemove", (event) => {
    const i = Math.floor(((event.clientX - root.getBoundingClientRect().left - left) / w) * filled.length);
    if (i < 0 || i >= filled.length) { cursor.setAttribute("visibility", "hidden"); return tip(""); }
    cursor.setAttribute("x1", x(i)); cursor.setAttribute("x2", x(i)); cursor.setAttribute("visibility", "visible");
    const total = filled[i].reduce((a, b) => a + b, 0);
    const lines = kinds.map((kind, k) => [filled[i][k], `${kind} ${bytes(filled[i][k])}`]).filter(([v]) => v).reverse().map(([, text]) => text);
    const what = named[i] < 0 ? "" : rank === null ? momentText(names[named[i]]) : momentText(names[named[i]]) || ": waiting";
    tip(`${seconds((i / filled.length) * length)}: ${bytes(total)}${what}\n${lines.join("\n")}`, event);
  });
  root.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); tip(""); });
  host.replaceChildren(root);
}
function fillMemory() {
  const { kinds, views } = D.memory, select = $("memory-view"), ranked = views.some((view) => view.rank !== null);
  const peaks = D.pipeline ? D.pipeline.peaks : [], several = peaks.length > 1;
  const of = D.limit ? ` of ${bytes(D.limit)}` : "";
  views.forEach((view, i) => select.append(el("option", { value: String(i) }, view.label)));
  select.parentElement.hidden = views.length < 2;
  const show = (index) => { select.value = String(index); drawMemory(Math.floor($("memory-svg").clientWidth)); };
  select.addEventListener("change", () => show(+select.value));
  const highest = peaks.indexOf(Math.max(...peaks));
  if (ranked) select.value = String(Math.max(0, highest));
  $("memory-text").textContent = several ? `All devices of a pipeline rank hold as much; rank ${highest} holds most, ${bytes(D.peak)}${of}.`
    : `Peak ${bytes(D.peak)} on each device${of}.`;
  $("memory-text").textContent += ranked
    ? ` Of what a rank does at a time${several ? ", with all its stages," : ""} the highest moment is drawn. One microbatch, op by op, is drawn beside as many others as there are at most.`
    : D.pipeline ? " Drawn is one microbatch beside as many others as there are at most."
    : " Of many equal blocks one is planned: what the others hold is added for each of them as they run.";
  kinds.slice().reverse().forEach((kind) => $("memory-legend").append(el("span", { title: D.kinds[kind] || "" }, el("i", { style: `background:${color(kind)}` }), kind)));
  if (!several) return;
  const whole = Math.max(...peaks, isNear() ? D.limit : 0);
  $("memory-peaks").append(el("h3", {}, `Peak of each pipeline rank${D.limit ? `, limit ${bytes(D.limit)}` : ""}`), el("div", { class: "peaks" },
    ...peaks.map((peak, rank) => el("div", { class: "bar peak", onclick: ranked ? () => show(rank) : () => {} },
      el("div", { class: "name" }, `rank ${rank}`),
      el("div", { class: "track" }, el("i", { style: `width:${(100 * peak) / whole}%;background:${color("parameters")}` })),
      el("div", { class: "num" }, bytes(peak), " ", el("small", {}, D.limit ? percent(peak / D.limit) : ""))))));
}

// --- time
function drawTime() {
  const host = $("time-bars"), step = D.step_s || 1;
  const spent = (s) => el("div", { class: "num" }, seconds(s), " ", el("small", {}, percent(s / step)));
  const bar = (name, small, parts, total) => el("div", { class: "bar" },
    el("div", { class: "name" }, name, el("small", {}, small)),
    el("div", { class: "track" }, ...parts.map(([s, fill, text]) => el("i", { style: `width:${(100 * s) / step}%;background:${fill}`, title: text }))),
    spent(total));
  const phases = { forward: 1, recompute: 0.75, backward: 0.55 };
  const computed = D.compute.map(([name, by]) => [name, by, by.reduce((sum, [, s]) => sum + s, 0)]);
  host.append(el("h3", {}, `Compute by class of op, ${seconds(computed.reduce((sum, row) => sum + row[2], 0))}`));
  for (const [name, by, total] of computed) {
    const parts = by.map(([phase, s]) => [s, `color-mix(in srgb, ${color(name)} ${100 * phases[phase]}%, var(--panel))`, `${phase} ${seconds(s)}`]);
    host.append(bar(name, by.map(([phase, s]) => `${phase} ${seconds(s)}`).join(", "), parts, total));
  }
  D.axes.forEach((axis, index) => {
    const rows = D.communication.filter((row) => row[0] === index && row[4] !== null);
    if (!rows.length) return;
    host.append(el("h3", {}, `Communication on ${axis}, ${D.mesh[index]} devices, ${seconds(rows.reduce((sum, row) => sum + row[4], 0))}`));
    for (const [, kind, times, size, s, all] of rows.sort((a, b) => b[4] - a[4])) {
      const hidden = all > 1e-12 ? all : 0;  // but for rounding
      const parts = [[s - hidden, color("comm"), `exposed ${seconds(s - hidden)}`], [hidden, `color-mix(in srgb, ${color("comm")} 40%, var(--panel))`, `hidden ${seconds(hidden)}`]];
      host.append(bar(kind.replaceAll("_", "-"), `${times} ×, ${bytes(size)} in all, ${seconds(hidden)} hidden`, parts, s));
    }
  });
  if (!D.communication.length) host.append(el("h3", {}, "No communication"));
  if (D.pipeline && D.pipeline.ranks > 1) {
    const waits = D.pipeline.bubble_s;
    host.append(el("h3", {}, "Bubble"), bar("waiting", `rank ${D.pipeline.longest} for other ranks`, [[waits, color("idle"), "waiting"]], waits));
  }
}
