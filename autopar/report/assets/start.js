"use strict";
// draws everything, once the other files have defined how
$("tensor-search").addEventListener("input", fillTensors);
// the largest parameter is the one to look at first
const first = D.parameters.reduce((best, p) => (!best || product(p.shape) > product(best.shape) ? p : best), null);
if (first) shown = first;
fillTensors();
redrawn($("tensor-svg"), drawTensor);
fillMemory();
redrawn($("memory-svg"), drawMemory);
drawTime();
if (D.pipeline) {
  fillPipelineLegend();
  redrawn($("pipeline-svg"), drawPipeline);
}
if (programs.length) fillProgramControls();
fillGraphControls();
drawGraph();
fillOps();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTensor);
document.documentElement.dataset.ready = "yes";
