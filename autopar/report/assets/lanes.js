"use strict";
// --- lines beside rows: a value from the row that makes it to the last that reads it
const ROW = 46;
function lanes(names, operands) {
  const row = new Map(names.map((name, i) => [name, i])), end = new Map();
  const reads = operands.map((found) => found.filter((name) => row.has(name)));
  reads.forEach((found, i) => found.forEach((name) => end.set(name, i)));
  const free = [], lane = new Map();
  names.forEach((name, i) => {
    if (!end.has(name)) return;
    let at = free.findIndex((until) => until <= i);
    if (at < 0) at = free.length;
    free[at] = end.get(name);
    lane.set(name, at);
  });
  const gap = 11, width = Math.min(free.length, 22) * gap + 22;
  const lines = svg("svg", { width, height: names.length * ROW, "aria-hidden": "true" });
  const x = (name) => 12 + (lane.get(name) % 22) * gap, mid = (i) => i * ROW + ROW / 2;
  const hue = (name) => `hsl(${(lane.get(name) * 67 + 215) % 360} 42% 55%)`;
  names.forEach((name, i) => {
    if (!lane.has(name)) return;
    lines.append(svg("line", { x1: x(name), x2: x(name), y1: mid(i), y2: mid(end.get(name)), style: `stroke:${hue(name)};stroke-width:1.5` }));
    lines.append(svg("circle", { cx: x(name), cy: mid(i), r: 4, style: `fill:${hue(name)}` }));
  });
  reads.forEach((found, i) => found.forEach((name) => lines.append(svg("line", { x1: x(name), x2: width - 4, y1: mid(i), y2: mid(i), style: `stroke:${hue(name)};stroke-opacity:.55` }))));
  return { lines, width };
}
