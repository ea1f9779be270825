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
  for (const [unit, scale] of [["ms", 1e3], ["µs", 1e6]]) if (s * scale >= 1) return +(s * scale).toPrecision(4) + " " + unit;
  return +(s * 1e9).toPrecision(4) + " ns";
}
const percent = (x) => (100 * x).toFixed(1) + "%";
const product = (xs) => xs.reduce((a, b) => a * b, 1);
const layoutText = (layout) => "(" + layout.join(", ") + ")";
// the forms of one thing share its colour: attention_causal has attention's
const color = (name) => `var(--${name}, var(--${name.split("_")[0]}, var(--inputs)))`;
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
