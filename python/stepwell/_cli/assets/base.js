// What all parts share: the data, elements, numbers for people, colours, the tooltip. Texts of the data reach the page as text only, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function size(bytes) {
  let amount = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (amount < 1024 || unit === "TiB") return unit === "B" ? `${bytes} B` : `${amount.toFixed(1)} ${unit}`;
    amount /= 1024;
  }
  return "";
}

const counted = (n) => n.toLocaleString("en-US").replaceAll(",", " ");
const plural = (n, one, several = `${one}s`) => `${counted(n)} ${n === 1 ? one : several}`;
const when = (iso) => new Date(iso).toLocaleString("sv-SE");
const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part * 100 < whole ? 2 : 1)} %` : "");
const real = (value) => (typeof value === "string" ? { NaN: NaN, Infinity, "-Infinity": -Infinity }[value] : value);

function figure(value) {
  const number = real(value);
  if (!Number.isFinite(number)) return String(number);
  return Math.abs(number) >= 1e6 || (number !== 0 && Math.abs(number) < 1e-4) ? number.toExponential(3) : String(+number.toPrecision(6));
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = 8;

// How light a colour (#rrggbb) is that lies on another: what is written on it must differ.
function lightness(over, under, alpha) {
  const channel = (text, at) => parseInt(text.slice(at, at + 2), 16) / 255;
  const mixed = [1, 3, 5].map((at) => alpha * channel(over, at) + (1 - alpha) * channel(under, at));
  const [r, g, b] = mixed.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Which colour each of some names has: the heaviest have one of their own, the rest share one.
function palette(weights) {
  const order = [...weights.entries()].sort((a, b) => b[1] - a[1]).map(([name]) => name);
  return new Map(order.map((name, i) => [name, i < COLOURS ? `c${i}` : "rest"]));
}

function legend(colours, label = (name) => name) {
  const shown = [...colours.entries()].filter(([, c]) => c !== "rest");
  const box = el("div", { class: "legend" });
  for (const [name, c] of shown) {
    const mark = el("i");
    mark.style.background = `var(--${c})`;
    box.append(el("span", {}, mark, label(name)));
  }
  if (colours.size > shown.length) {
    const mark = el("i");
    mark.style.background = "var(--rest)";
    box.append(el("span", {}, mark, `${colours.size - shown.length} more`));
  }
  return box;
}

const tip = document.getElementById("tip");

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = tip;
  const x = event.clientX + 14 + w > innerWidth ? event.clientX - w - 10 : event.clientX + 14;
  const y = event.clientY + 14 + h > innerHeight ? event.clientY - h - 10 : event.clientY + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

const hideTip = () => (tip.hidden = true);

// Everything that is drawn by pixels is drawn anew when its width or the theme changes.
const drawings = [];

function drawing(height, draw, properties = {}) {
  const canvas = el("canvas", properties);
  canvas.style.height = `${height}px`;
  const redraw = () => {
    const width = canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    draw(g, width, height);
  };
  drawings.push(redraw);
  new ResizeObserver(redraw).observe(canvas);
  canvas.addEventListener("mouseleave", hideTip);
  return { canvas, redraw };
}

function tiles(pairs) {
  const tile = ([label, value]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label));
  return el("div", { class: "tiles" }, ...pairs.map(tile));
}

function part(heading, ...children) {
  const made = el("section", {}, el("h2", {}, heading), ...children);
  document.getElementById("main").append(made);
  return made;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const redraw of drawings) redraw();
}

document.getElementById("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawings.forEach((redraw) => redraw()));
