"use strict";
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
// devices of one pipeline rank; those of rank r are the r-th of so many equal runs
const DEVICES = product(D.mesh);
const RANKS = D.pipeline ? D.pipeline.ranks : 1;
const listed = (xs) => (xs.length > 1 ? `${xs.slice(0, -1).join(", ")} and ${xs[xs.length - 1]}` : String(xs[0]));
const ranksText = (ranks) => (ranks.length ? `pipeline rank${ranks.length > 1 ? "s" : ""} ${listed(ranks)}` : "");
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
  const each = blocks.length ? DEVICES / blocks.length : DEVICES, ranks = shown.ranks.length ? shown.ranks : [0];
  const where = RANKS > 1 ? ` of ${ranks.length > 1 ? "each of " : ""}${ranksText(ranks)}` : "";
  $("tensor-text").textContent = `${axisText(layout)}. ${blocks.length} block${blocks.length > 1 ? "s" : ""}, each held by ` +
    `${each} device${each > 1 ? "s" : ""}${where}` + (shown.own ? ", each rank having values of its own" : "") + (shown.mode ? `. ${shown.mode}` : "") + (shown.bytes ? `. ${bytes(shown.bytes)} per device.` : ".");
  const cells = [], rects = [];
  const highlight = (block) => {
    for (const [node, own] of [...cells, ...rects]) {
      node.classList.toggle("on", own === block);
      node.classList.toggle("off", block !== null && own !== block);
    }
    const devices = block ? ranks.flatMap((rank) => block.ranks.map((device) => rank * DEVICES + device)) : [];
    $("hover-text").textContent = block ? `Held by device${devices.length > 1 ? "s" : ""} ${devices.slice(0, 24).join(", ")}${devices.length > 24 ? ", …" : ""}: ` +
      (sharded.length ? sharded.map((dim, i) => `dim ${dim} [${block.parts[i].slice(0, 3).map(([s, n]) => `${s}:${s + n}`).join(", ")}${block.parts[i].length > 3 ? ", …" : ""}]`).join(" × ") : "all of it") : "";
  };
  const over = (block) => ({ onmouseenter: () => highlight(block), onmouseleave: () => highlight(null) });
  drawBlocks(host, width, shape, sharded, blocks, rects, over, places);
  drawMesh($("mesh-svg"), width, holder, cells, over, places, ranks);
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
function drawMesh(host, width, holder, cells, over, places, ranks) {
  // the last two axes are a grid, the larger one across; each earlier coordinate and pipeline rank has a grid
  const n = D.mesh.length;
  const last = n - 1, before = n - 2;
  let across = last, down = before;
  if (before >= 0 && D.mesh[before] > D.mesh[last]) [across, down] = [before, last];
  const cols = D.mesh[across], rows = down >= 0 ? D.mesh[down] : 1;
  const wrap = down < 0 && cols > 64 ? 32 : cols;
  const outer = n > 2 ? D.mesh.slice(0, n - 2) : [], inside = product(outer), panels = RANKS * inside;
  const fit = panels > 1 ? Math.min(width, Math.max(96, width / Math.ceil(Math.sqrt(panels)) - 40)) : width - 60;
  const size = Math.max(4, Math.min(40, Math.floor(fit / wrap)));
  const lines = Math.ceil(cols / wrap) * rows;
  host.replaceChildren();
  for (let panel = 0; panel < panels; panel++) {
    const holding = ranks.includes(Math.floor(panel / inside)), base = Math.floor(panel / inside) * DEVICES;
    const w = wrap * size, h = lines * size, left = down >= 0 ? 58 : 0;
    const root = svg("svg", { width: left + Math.max(w, 150), height: h + 22, role: "img", "aria-label": "Devices of the mesh" });
    for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) {
      const coords = new Array(n).fill(0);
      let rest = panel % inside;
      for (let axis = n - 3; axis >= 0; axis--) { coords[axis] = rest % D.mesh[axis]; rest = Math.floor(rest / D.mesh[axis]); }
      coords[across] = c;
      if (down >= 0) coords[down] = r;
      const rank = coords.reduce((acc, at, axis) => acc * D.mesh[axis] + at, 0);
      const x = left + (c % wrap) * size, y = (r + Math.floor(c / wrap)) * size;
      const cell = svg("rect", { class: "cell", x, y, width: size, height: size, rx: size > 14 ? 3 : 0, ...(holding ? over(holder[rank]) : {}) });
      cell.style.fill = holding ? paint(holder[rank], places) : "var(--soft)";
      cell.dataset.device = String(base + rank);
      if (holding) cells.push([cell, holder[rank]]);
      root.append(cell);
      if (size >= 26) {
        const label = svg("text", { x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle", "pointer-events": "none" }, String(base + rank));
        if (holding) label.style.cssText = "fill:#fff;paint-order:stroke;stroke:rgb(0 0 0 / .35);stroke-width:2px";
        root.append(label);
      }
    }
    if (down >= 0) root.append(svg("text", { x: 50, y: h / 2 + 4, "text-anchor": "end" }, D.axes[down].slice(0, 8)));
    const coordinates = outer.map((_, axis) => `${D.axes[axis]} ${Math.floor(panel / product(outer.slice(axis + 1))) % outer[axis]}`);
    if (RANKS > 1) coordinates.unshift(`rank ${Math.floor(panel / inside)}`);
    const at = coordinates.length ? coordinates.join(", ") + ": " : "";
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
    const text = `${p.label} ${p.mode} ${p.layout.join(" ")} ${ranksText(p.ranks)}`.toLowerCase();
    if (!words.every((word) => text.includes(word))) continue;
    if (p.block !== block && p.block) host.append(el("div", { class: "head mono" }, p.block));
    block = p.block;
    const button = el("button", { type: "button", role: "option", "aria-selected": p === shown, onclick: () => showTensor(p) },
      el("span", { class: "mono" }, p.name || p.block), el("span", {}, `${layoutText(p.layout)} ${p.mode}${p.ranks.length ? `, ${ranksText(p.ranks)}` : ""}`));
    button.tensor = p;
    host.append(button);
    if (++kept >= 400) { host.append(el("div", { class: "head" }, "more: search for them")); break; }
  }
  if (!kept) host.append(el("div", { class: "head" }, "nothing matches"));
}
