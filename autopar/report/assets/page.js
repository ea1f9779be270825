"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// --- elements, always with text and never with markup
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "style") node.style.cssText = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function bytes(n) {
  if (n < 1024) return n.toFixed(0) + " B";
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    n /= 1024;
    if (n < 1024) return n.toFixed(2) + " " + unit;
  }
  return (n / 1024).toFixed(2) + " PiB";
}
function seconds(s) {
  if (s === 0 || s >= 1) return +s.toPrecision(4) + " s";
  return s >= 1e-3 ? +(s * 1e3).toPrecision(4) + " ms" : +(s * 1e6).toPrecision(4) + " µs";
}
const percent = (x) => (100 * x).toFixed(1) + "%";
const product = (xs) => xs.reduce((a, b) => a * b, 1);
const layoutText = (layout) => "(" + layout.join(", ") + ")";
const color = (name) => `var(--${name}, var(--inputs))`;
function tip(text, event) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 8);
  const top = event.clientY + 18 + box.offsetHeight > window.innerHeight
    ? event.clientY - box.offsetHeight - 12 : event.clientY + 18;
  box.style.left = Math.max(8, left) + "px";
  box.style.top = Math.max(8, top) + "px";
}
function redrawn(host, draw) {
  let last = 0;
  const again = () => {
    const width = Math.floor(host.clientWidth);
    if (width && width !== last) { last = width; draw(width); }
  };
  again();
  new ResizeObserver(again).observe(host);
}

// --- who holds what
const parsed = (text) => {
  const match = /^S(\d+)(?:\/(\d+))?$/.exec(text);
  return match ? { dim: +match[1], split: +(match[2] || 1) } : { dim: -1, split: 1, partial: text === "P" };
};
// the runs of indices along `dim` that the device at `coords` holds, as core/placement.py has them
function runs(size, dim, layout, coords) {
  let start = 0, length = size, strided = null;
  layout.forEach((p, axis) => {
    if (p.dim !== dim) return;
    if (p.split > 1) { strided = [D.mesh[axis], coords[axis], p.split]; return; }
    length /= D.mesh[axis];
    start += coords[axis] * length;
  });
  if (!strided) return [[start, length]];
  const [n, at, split] = strided;
  if (length !== size) return [[start + at * (length / n), length / n]];
  const run = size / split;
  return Array.from({ length: split }, (_, part) => [part * run + at * (run / n), run / n]);
}
const DEVICES = product(D.mesh);
function coordsOf(rank) {
  const out = [];
  for (let axis = D.mesh.length - 1; axis >= 0; axis--) {
    out.unshift(rank % D.mesh[axis]);
    rank = Math.floor(rank / D.mesh[axis]);
  }
  return out;
}
function blocksOf(shape, layout) {
  const found = new Map(), holder = [];
  const sharded = [...new Set(layout.filter((p) => p.dim >= 0).map((p) => p.dim))].sort((a, b) => a - b);
  for (let rank = 0; rank < DEVICES; rank++) {
    const coords = coordsOf(rank);
    const parts = sharded.map((dim) => runs(shape[dim], dim, layout, coords));
    const key = JSON.stringify(parts);
    if (!found.has(key)) found.set(key, { parts, ranks: [] });
    found.get(key).ranks.push(rank);
    holder.push(found.get(key));
  }
  return { sharded, blocks: [...found.values()], holder };
}
// the place on the largest axis that splits the tensor is the hue, that on the others the lightness
function paint(block, places) {
  const axes = D.mesh.map((_, axis) => axis).filter((axis) => places[axis].dim >= 0 && D.mesh[axis] > 1);
  if (!axes.length) return color("parameters");
  axes.sort((a, b) => D.mesh[b] - D.mesh[a]);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const at = coordsOf(block.ranks[0]), rest = axes.slice(1);
  const others = product(rest.map((axis) => D.mesh[axis]));
  const shade = rest.reduce((sum, axis) => sum * D.mesh[axis] + at[axis], 0) / Math.max(1, others - 1);
  const hue = 222 + (290 * at[axes[0]]) / D.mesh[axes[0]];
  const light = others === 1 ? (dark ? 56 : 54) : (dark ? 30 : 34) + 32 * shade;
  return `hsl(${hue % 360} 46% ${light}%)`;
}
let shown = null;
function showTensor(tensor) {
  shown = tensor;
  for (const b of $("tensor-list").querySelectorAll("button")) b.setAttribute("aria-selected", b.tensor === tensor);
  drawTensor();
}
function axisText(layout) {
  return layout.map((text, axis) => {
    const p = parsed(text), name = D.axes[axis];
    if (p.partial) return `each device along ${name} holds a summand`;
    if (p.dim < 0) return `whole along ${name}`;
    return `dim ${p.dim} split over ${name}` + (p.split > 1 ? `, in each of ${p.split} parts` : "");
  }).join("; ");
}
function drawTensor() {
  const host = $("tensor-svg"), width = Math.floor(host.clientWidth);
  if (!shown || !width) return;
  const { shape, layout } = shown, places = layout.map(parsed);
  const { sharded, blocks, holder } = blocksOf(shape, places);
  $("tensor-title").textContent = `${shown.label}  [${shape.join(", ")}]  ${layoutText(layout)}`;
  const each = blocks.length ? DEVICES / blocks.length : DEVICES;
  $("tensor-text").textContent = `${axisText(layout)}. ${blocks.length} block${blocks.length > 1 ? "s" : ""}, each held by ` +
    `${each} device${each > 1 ? "s" : ""}` + (shown.mode ? `. ${shown.mode}` : "") + (shown.bytes ? `. ${bytes(shown.bytes)} per device.` : ".");
  const cells = [], rects = [];
  const highlight = (block) => {
    for (const [node, own] of [...cells, ...rects]) {
      node.classList.toggle("on", own === block);
      node.classList.toggle("off", block !== null && own !== block);
    }
    const ranks = block ? block.ranks : [];
    $("hover-text").textContent = block ? `Held by rank${ranks.length > 1 ? "s" : ""} ${ranks.slice(0, 24).join(", ")}${ranks.length > 24 ? ", …" : ""}: ` +
      (sharded.length ? sharded.map((dim, i) => `dim ${dim} [${block.parts[i].slice(0, 3).map(([s, n]) => `${s}:${s + n}`).join(", ")}${block.parts[i].length > 3 ? ", …" : ""}]`).join(" × ") : "all of it") : "";
  };
  const over = (block) => ({ onmouseenter: () => highlight(block), onmouseleave: () => highlight(null) });
  drawBlocks(host, width, shape, sharded, blocks, rects, over, places);
  drawMesh($("mesh-svg"), width, holder, cells, over, places);
  $("hover-text").textContent = "";
}
function drawBlocks(host, width, shape, sharded, blocks, rects, over, places) {
  const dims = shape.map((_, dim) => dim);
  const two = sharded.slice(0, 2);
  for (const dim of [...dims].sort((a, b) => shape[b] - shape[a])) if (two.length < 2 && !two.includes(dim)) two.push(dim);
  two.sort((a, b) => a - b);
  const [rowDim, colDim] = two.length === 2 ? two : [-1, two.length ? two[0] : -1];
  const rows = rowDim >= 0 ? shape[rowDim] : 1, cols = colDim >= 0 ? shape[colDim] : 1;
  const ratio = Math.min(Math.max(rows / cols, 0.12), 1.1);
  const w = Math.min(width - 70, 560), h = rowDim < 0 ? 34 : Math.max(40, Math.min(210, w * ratio));
  const root = svg("svg", { width, height: h + 26, role: "img", "aria-label": "Blocks of the tensor" });
  const parts = (block, dim, size) => {
    const at = sharded.indexOf(dim);
    return at < 0 ? [[0, size]] : block.parts[at];
  };
  for (const block of blocks) {
    for (const [r, nr] of parts(block, rowDim, rows)) for (const [c, nc] of parts(block, colDim, cols)) {
      const rect = svg("rect", { class: "cell", x: 58 + (c / cols) * w, y: (r / rows) * h, width: Math.max((nc / cols) * w, 0.6), height: Math.max((nr / rows) * h, 0.6), ...over(block) });
      rect.style.fill = paint(block, places);
      if (blocks.length > 200) rect.style.strokeWidth = 0.3;
      rects.push([rect, block]);
      root.append(rect);
    }
  }
  if (rowDim >= 0) {
    root.append(svg("text", { x: 50, y: h / 2 - 2, "text-anchor": "end" }, `dim ${rowDim}`), svg("text", { x: 50, y: h / 2 + 13, "text-anchor": "end" }, String(rows)));
  }
  root.append(svg("text", { x: 58 + w / 2, y: h + 17, "text-anchor": "middle" }, colDim >= 0 ? `dim ${colDim}: ${cols}` : "a scalar"));
  host.replaceChildren(root);
}
function drawMesh(host, width, holder, cells, over, places) {
  // the last two axes are a grid, the larger one across; each earlier coordinate has a grid
  const n = D.mesh.length;
  const last = n - 1, before = n - 2;
  let across = last, down = before;
  if (before >= 0 && D.mesh[before] > D.mesh[last]) [across, down] = [before, last];
  const cols = D.mesh[across], rows = down >= 0 ? D.mesh[down] : 1;
  const wrap = down < 0 && cols > 64 ? 32 : cols;
  const outer = n > 2 ? D.mesh.slice(0, n - 2) : [], panels = product(outer);
  const fit = panels > 1 ? Math.min(width, Math.max(96, width / Math.ceil(Math.sqrt(panels)) - 40)) : width - 60;
  const size = Math.max(4, Math.min(40, Math.floor(fit / wrap)));
  const lines = Math.ceil(cols / wrap) * rows;
  host.replaceChildren();
  for (let panel = 0; panel < panels; panel++) {
    const w = wrap * size, h = lines * size, left = down >= 0 ? 58 : 0;
    const root = svg("svg", { width: left + Math.max(w, 150), height: h + 22, role: "img", "aria-label": "Devices of the mesh" });
    for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) {
      const coords = new Array(n).fill(0);
      let rest = panel;
      for (let axis = n - 3; axis >= 0; axis--) { coords[axis] = rest % D.mesh[axis]; rest = Math.floor(rest / D.mesh[axis]); }
      coords[across] = c;
      if (down >= 0) coords[down] = r;
      const rank = coords.reduce((acc, at, axis) => acc * D.mesh[axis] + at, 0);
      const x = left + (c % wrap) * size, y = (r + Math.floor(c / wrap)) * size;
      const cell = svg("rect", { class: "cell", x, y, width: size, height: size, rx: size > 14 ? 3 : 0, ...over(holder[rank]) });
      cell.style.fill = paint(holder[rank], places);
      cells.push([cell, holder[rank]]);
      root.append(cell);
      if (size >= 26) {
        const label = svg("text", { x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle", "pointer-events": "none" }, String(rank));
        label.style.cssText = "fill:#fff;paint-order:stroke;stroke:rgb(0 0 0 / .35);stroke-width:2px";
        root.append(label);
      }
    }
    if (down >= 0) root.append(svg("text", { x: 50, y: h / 2 + 4, "text-anchor": "end" }, D.axes[down].slice(0, 8)));
    const at = outer.length ? outer.map((_, axis) => `${D.axes[axis]} ${Math.floor(panel / product(outer.slice(axis + 1))) % outer[axis]}`).join(", ") + ": " : "";
    root.append(svg("text", { x: left, y: h + 16 }, `${at}${D.axes[across]} →`));
    host.append(root);
  }
}
function fillTensors() {
  const host = $("tensor-list"), words = $("tensor-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  host.replaceChildren();
  let block = "", kept = 0;
  for (const p of D.parameters) {
    p.label = (p.block ? p.block + "." : "") + p.name;
    const text = `${p.label} ${p.mode} ${p.layout.join(" ")}`.toLowerCase();
    if (!words.every((word) => text.includes(word))) continue;
    if (p.block !== block && p.block) host.append(el("div", { class: "head mono" }, p.block));
    block = p.block;
    const button = el("button", { type: "button", role: "option", "aria-selected": p === shown, onclick: () => showTensor(p) },
      el("span", { class: "mono" }, p.name || p.block), el("span", {}, `${layoutText(p.layout)} ${p.mode}`));
    button.tensor = p;
    host.append(button);
    if (++kept >= 400) { host.append(el("div", { class: "head" }, "more: search for them")); break; }
  }
  if (!kept) host.append(el("div", { class: "head" }, "nothing matches"));
}

// --- memory over time
function drawMemory(width) {
  const host = $("memory-svg"), { kinds, rows, ops, backward_s } = D.memory;
  if (!rows.some((row) => row.length)) { $("memory-text").textContent = "The plan has no timeline."; return; }
  const near = D.limit && D.peak > 0.4 * D.limit;
  const top = (near ? Math.max(D.limit, D.peak) : D.peak) * 1.04, h = 250, left = 74, w = width - left - 6, bottom = 26;
  const filled = [];
  rows.forEach((row, i) => filled.push(row.length ? row : filled[i - 1] || kinds.map(() => 0)));
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
  const time = (s) => left + (s / D.step_s) * w;
  root.append(svg("text", { x: left, y: h + 26 }, "0"), svg("text", { x: left + w, y: h + 26, "text-anchor": "end" }, seconds(D.step_s)));
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
    tip(`${seconds((i / filled.length) * D.step_s)}: ${bytes(total)}${ops[i] ? ` at ${ops[i]}` : ""}\n${lines.join("\n")}`, event);
  });
  root.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); tip(""); });
  host.replaceChildren(root);
}
function fillMemoryLegend() {
  const { kinds, rows } = D.memory;
  $("memory-text").textContent = `Peak ${bytes(D.peak)} on each device` + (D.limit ? ` of ${bytes(D.limit)}.` : ".") +
    " Of many equal blocks one is planned: what the others hold is added for each of them as they run.";
  kinds.slice().reverse().forEach((kind) => $("memory-legend").append(el("span", { title: D.kinds[kind] || "" }, el("i", { style: `background:${color(kind)}` }), kind)));
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
    for (const [, kind, times, size, s] of rows.sort((a, b) => b[4] - a[4])) host.append(bar(kind.replaceAll("_", "-"), `${times} ×, ${bytes(size)} in all`, [[s, color("comm"), seconds(s)]], s));
  });
  if (!D.communication.length) host.append(el("h3", {}, "No communication"));
}

// --- graph of a block
const byName = new Map(D.ops.map((op) => [op.name, op]));
const cost = (op) => op.compute_s * op.times + op.moves.reduce((sum, m) => sum + m[3] * m[4], 0);
function tensorOf(op) { return { label: op.name, shape: op.shapes[0] || [], layout: op.outputs[0] || [], mode: op.op, bytes: 0 }; }
function showOp(op) {
  if (!op.outputs.length) return;
  showTensor(tensorOf(op));
  $("holds").scrollIntoView();
}
function movesText(op) {
  return op.moves.map(([axis, kind, size, times, s, of]) => `${kind.replaceAll("_", "-")} on ${D.axes[axis]}${of ? ` of ${of}` : ""}: ${bytes(size)}${times > 1 ? ` × ${times}` : ""}, ${seconds(s * times)}`).join("\n");
}
function fillGraphControls() {
  const blocks = new Map();
  for (const op of D.ops) {
    const known = blocks.get(op.block) || { times: 1, count: 0 };
    blocks.set(op.block, { times: Math.max(known.times, op.times), count: known.count + 1 });
  }
  const select = $("graph-block");
  const entries = [...blocks].sort((a, b) => b[1].times - a[1].times);
  for (const [block, { times, count }] of entries) select.append(el("option", { value: block }, `${block || "outside of blocks"}${times > 1 ? ` (stands for ${times})` : ""}, ${count} ops`));
  for (const phase of ["forward", "recompute", "backward"]) if (D.ops.some((op) => op.phase === phase)) $("graph-phase").append(el("option", { value: phase }, phase));
  for (const id of ["graph-block", "graph-phase", "graph-views"]) $(id).addEventListener("change", drawGraph);
}
function behindViews(name) {
  for (let op = byName.get(name); op && op.class === "view" && op.operands.length; op = byName.get(name)) name = op.operands[0];
  return name;
}
function drawGraph() {
  const views = $("graph-views").checked;
  const ops = D.ops.filter((op) => op.block === $("graph-block").value && op.phase === $("graph-phase").value && (views || op.class !== "view")).slice(0, 600);
  const source = (name) => (views ? name : behindViews(name));
  const row = new Map(ops.map((op, i) => [op.name, i])), end = new Map(), reads = ops.map((op) => op.operands.map(source).filter((name) => row.has(name)));
  reads.forEach((names, i) => names.forEach((name) => end.set(name, i)));
  const free = [], lane = new Map();
  ops.forEach((op, i) => {
    if (!end.has(op.name)) return;
    let at = free.findIndex((until) => until <= i);
    if (at < 0) at = free.length;
    free[at] = end.get(op.name);
    lane.set(op.name, at);
  });
  const H = 46, gap = 11, width = Math.min(free.length, 22) * gap + 22;
  const host = el("div"), lines = svg("svg", { width, height: ops.length * H, "aria-hidden": "true" });
  const x = (name) => 12 + (lane.get(name) % 22) * gap, mid = (i) => i * H + H / 2;
  const hue = (name) => `hsl(${(lane.get(name) * 67 + 215) % 360} 42% 55%)`;
  ops.forEach((op, i) => {
    if (!lane.has(op.name)) return;
    lines.append(svg("line", { x1: x(op.name), x2: x(op.name), y1: mid(i), y2: mid(end.get(op.name)), style: `stroke:${hue(op.name)};stroke-width:1.5` }));
    lines.append(svg("circle", { cx: x(op.name), cy: mid(i), r: 4, style: `fill:${hue(op.name)}` }));
  });
  reads.forEach((names, i) => names.forEach((name) => lines.append(svg("line", { x1: x(name), x2: width - 4, y1: mid(i), y2: mid(i), style: `stroke:${hue(name)};stroke-opacity:.55` }))));
  ops.forEach((op) => host.append(graphRow(op, width)));
  host.prepend(lines);
  $("graph-rows").replaceChildren(ops.length ? host : el("p", { class: "note" }, "No ops here."));
}
const shortOp = (op) => op.op.split(".").slice(-2)[0] || op.op;
function graphRow(op, width) {
  const given = op.inputs.map(layoutText).join(" × ") || "–", made = op.outputs.map(layoutText).join(", ");
  const weights = op.operands.map(behindViews).filter((name) => !byName.has(name) && name.includes(".")).map((name) => name.split(".").slice(-2).join("."));
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
  ["Op", (op) => op.name, "30%", ""], ["Module and source", (op) => op.module, "26%", "wide"],
  ["Result", (op) => op.outputs.map(layoutText).join(), "18%", ""], ["Times", (op) => op.times, "62px", "n wide"],
  ["Compute", (op) => op.compute_s * op.times, "86px", "n"], ["Comm.", (op) => cost(op) - op.compute_s * op.times, "86px", "n"],
  ["Total", cost, "86px", "n"], ["This alone", (op) => (op.more_s === null ? Infinity : op.more_s), "98px", "n"],
];
let order = { column: 6, down: true }, limit = 60;
function drawOps() {
  const words = $("op-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = D.ops.filter((op) => words.every((word) => op.text.includes(word)));
  const key = COLUMNS[order.column][1], sign = order.down ? -1 : 1;
  found.sort((a, b) => { const x = key(a), y = key(b); return x < y ? -sign : x > y ? sign : 0; });
  const small = (s) => (s ? seconds(s) : "–");
  const rows = found.slice(0, limit).map((op) => el("tr", { onclick: () => showOp(op), title: movesText(op) },
    el("td", {}, el("span", { class: "mono" }, op.name), el("small", {}, `${op.op}, ${op.phase}`)),
    el("td", { class: "wide" }, op.module || "–", el("small", {}, op.source)),
    el("td", { class: "mono" }, op.outputs.map(layoutText).join(", ")),
    el("td", { class: "n wide" }, String(op.times)), el("td", { class: "n" }, small(op.compute_s * op.times)),
    el("td", { class: "n" }, small(cost(op) - op.compute_s * op.times)), el("td", { class: "n" }, small(cost(op))),
    el("td", { class: "n", title: op.other.map(layoutText).join(", ") }, op.more_s === null ? "none" : "+" + seconds(op.more_s))));
  $("op-table").tBodies[0].replaceChildren(...rows);
  $("op-count").textContent = `${found.length} of ${D.ops.length} ops`;
  $("op-more").hidden = found.length <= limit;
  [...$("op-table").tHead.rows[0].cells].forEach((cell, i) => cell.setAttribute("aria-sort", i !== order.column ? "none" : order.down ? "descending" : "ascending"));
}
function fillOps() {
  for (const op of D.ops) op.text = [op.name, op.op, op.class, op.phase, op.module, op.source, ...op.outputs.map(layoutText), ...op.moves.map((m) => m[1]), ...op.operands.filter((name) => name.includes("."))].join(" ").toLowerCase();
  COLUMNS.forEach(([name, , width, cls], column) => $("op-table").tHead.rows[0].append(el("th", { class: cls, style: `width:${width}`, scope: "col", onclick: () => {
    order = { column, down: order.column === column ? !order.down : column > 2 };
    drawOps();
  } }, name)));
  $("op-search").addEventListener("input", () => { limit = 60; drawOps(); });
  $("op-more").addEventListener("click", () => { limit += 240; drawOps(); });
  drawOps();
}

$("tensor-search").addEventListener("input", fillTensors);
// the largest parameter is the one to look at first
const first = D.parameters.reduce((best, p) => (!best || product(p.shape) > product(best.shape) ? p : best), null);
if (first) shown = first;
fillTensors();
redrawn($("tensor-svg"), drawTensor);
fillMemoryLegend();
redrawn($("memory-svg"), drawMemory);
drawTime();
fillGraphControls();
drawGraph();
fillOps();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTensor);
document.documentElement.dataset.ready = "yes";
