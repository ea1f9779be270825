"use strict";
// --- what each stage does when
const ACTIONS = {
  F: ["forward", "matmul"], B: ["backward", "attention"], I: ["backward, towards the input", "backward"],
  W: ["backward, of weights", "conv"], P: ["once, before the microbatches", "once"], R: ["once, behind the microbatches", "last"],
};
function drawPipeline(width) {
  const { slots, ranks } = D.pipeline, stages = 1 + Math.max(...slots.map((slot) => slot[2]));
  const order = [...Array(stages).keys()].sort((a, b) => a % ranks - b % ranks || a - b);
  const left = 130, row = 26, w = width - left - 6, h = stages * row;
  const x = (s) => left + (s / D.step_s) * w;
  const root = svg("svg", { width, height: h + 26, role: "img", "aria-label": "What each pipeline stage does over the step" });
  order.forEach((stage, i) => {
    root.append(svg("text", { x: left - 8, y: i * row + 17, "text-anchor": "end" }, `rank ${stage % ranks}, stage ${stage}`));
    root.append(svg("line", { x1: left, x2: left + w, y1: (i + 1) * row, y2: (i + 1) * row, style: "stroke:var(--line)" }));
  });
  const place = new Map(order.map((stage, i) => [stage, i]));
  slots.forEach(([rank, kind, stage, microbatch, start, length]) => {
    const [name, tint] = ACTIONS[kind], at = x(start), wide = Math.max(x(start + length) - at, 0.5), y = place.get(stage) * row;
    const once = kind === "P" || kind === "R";
    const text = `stage ${stage}: ${name}${once ? "" : `, microbatch ${microbatch}`}\n${seconds(start)} to ${seconds(start + length)}: ${seconds(length)}`;
    root.append(svg("rect", { x: at, y: y + 3, width: wide, height: row - 6, style: `fill:${color(tint)};stroke:var(--panel)`,
      "data-kind": kind, onmousemove: (event) => tip(text, event), onmouseleave: () => tip("") }));
    if (!once && wide > 9 + 6 * String(microbatch).length) {
      root.append(svg("text", { x: at + wide / 2, y: y + 17, "text-anchor": "middle", style: "pointer-events:none;fill:var(--text)" }, String(microbatch)));
    }
  });
  root.append(svg("text", { x: left, y: h + 18 }, "0"), svg("text", { x: left + w, y: h + 18, "text-anchor": "end" }, seconds(D.step_s)));
  $("pipeline-svg").replaceChildren(root);
}
function fillPipelineLegend() {
  const kinds = new Set(D.pipeline.slots.map((slot) => slot[1])), seen = new Set();
  for (const [kind, [name, tint]] of Object.entries(ACTIONS)) {
    if (!kinds.has(kind) || seen.has(name)) continue;
    seen.add(name);
    $("pipeline-legend").append(el("span", {}, el("i", { style: `background:${color(tint)}` }), name));
  }
}
