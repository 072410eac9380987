// Bytes by leaf path, as nested rectangles (squarified: Bruls, Huizing, van Wijk 2000). A click goes one level down, the path above leads back up.

const HEADER = 16;
const LEAST = 3;

// Rectangles for children (heaviest first) of known total weight.
function squarify(children, weight, total, x, y, w, h, place) {
  let from = 0;
  let left = total;
  while (from < children.length && left > 0 && w > 0 && h > 0) {
    const side = Math.min(w, h);
    const scale = (w * h) / left;
    let to = from;
    let sum = 0;
    let worst = Infinity;
    while (to < children.length) {
      const next = sum + weight(children[to]);
      if (next === 0) break;
      const thick = (next * scale) / side;
      const long = (weight(children[from]) * scale) / thick;
      const short = (weight(children[to]) * scale) / thick;
      const ratio = Math.max(long / thick, thick / short);
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      to += 1;
    }
    if (to === from) break;
    const thick = (sum * scale) / side;
    let at = 0;
    for (let i = from; i < to; i++) {
      const length = (weight(children[i]) / sum) * side;
      if (w >= h) place(children[i], x, y + at, thick, length);
      else place(children[i], x + at, y, length, thick);
      at += length;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    left -= sum;
    from = to;
  }
}

function treemap(state, choose) {
  const { nodes, leaves } = state;
  let top = 0;
  let hits = [];
  let byDtype = false;
  const crumbs = el("div", { class: "crumbs" });
  const legends = el("div");
  const dtypes = new Map();
  const entries = new Map();
  nodes.forEach((node) => {
    if (node.leaf < 0) return;
    const leaf = leaves[node.leaf];
    dtypes.set(leaf.dtype, (dtypes.get(leaf.dtype) || 0) + leaf.stored);
    entries.set(node.entry, (entries.get(node.entry) || 0) + leaf.stored);
  });
  const ofDtype = palette(dtypes);
  const ofEntry = palette(entries);

  function fill(node) {
    const leaf = leaves[node.leaf];
    return byDtype ? ofDtype.get(leaf.dtype) : ofEntry.get(node.entry);
  }

  const { canvas, redraw } = drawing(460, (g, width, height) => {
    hits = [];
    const colours = new Map([...Array(COLOURS).keys()].map((i) => [`c${i}`, colour(`c${i}`)]));
    colours.set("rest", colour("rest"));
    const [panel, ink, soft] = ["panel", "ink", "soft"].map(colour);
    g.clearRect(0, 0, width, height);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";

    const label = (text, x, y, w, tint) => {
      if (w < 26) return;
      const room = Math.floor((w - 8) / 6.2);
      g.fillStyle = tint;
      g.save();
      g.beginPath();
      g.rect(x, y - 8, w - 2, 16);
      g.clip();
      g.fillText(text.length > room ? `${text.slice(0, Math.max(1, room - 1))}…` : text, x + 4, y);
      g.restore();
    };

    const draw = (number, x, y, w, h, depth) => {
      const node = nodes[number];
      if (w < 0.3 || h < 0.3) return;
      hits.push({ number, x, y, w, h });
      if (node.leaf >= 0) {
        const tint = colours.get(fill(node));
        // Neighbours of one colour are told apart by how full it is.
        const alpha = 0.72 + 0.28 * ((node.order * 0.381966) % 1);
        g.fillStyle = tint;
        g.globalAlpha = alpha;
        g.fillRect(x, y, w - Math.min(1, w / 6), h - Math.min(1, h / 6));
        g.globalAlpha = 1;
        if (h > 15) label(node.name, x, y + Math.min(h / 2, 10), w, lightness(tint, panel, alpha) > 0.4 ? "#14171b" : "#fff");
        return;
      }
      if (w < LEAST || h < LEAST) {
        g.fillStyle = colours.get("rest");
        g.fillRect(x, y, w, h);
        return;
      }
      let [ix, iy, iw, ih] = [x, y, w, h];
      if (depth > 0 && w > 48 && h > 3 * HEADER) {
        g.fillStyle = soft;
        g.fillRect(x, y, w - 1, HEADER);
        label(`${node.name}  ${size(node.bytes)}`, x, y + HEADER / 2, w, ink);
        [iy, ih] = [iy + HEADER, ih - HEADER];
      }
      squarify(node.children, (child) => nodes[child].bytes, node.bytes, ix, iy, iw, ih, (child, ...box) => draw(child, ...box, depth + 1));
    };

    g.fillStyle = panel;
    g.fillRect(0, 0, width, height);
    draw(top, 0, 0, width, height, 0);
    if (!nodes[top].bytes) label("nothing is stored below", 8, 20, width, ink);
  }, { class: "click" });

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let found = null;
    for (const hit of hits) {
      if (x >= hit.x && x < hit.x + hit.w && y >= hit.y && y < hit.y + hit.h) found = hit;
    }
    return found === null ? null : found.number;
  }

  canvas.addEventListener("mousemove", (event) => {
    const number = under(event);
    if (number === null) return hideTip();
    const node = nodes[number];
    const of = share(node.bytes, nodes[0].bytes);
    if (node.leaf < 0) return showTip(event, `${node.path || "."}\n${node.kind} of ${plural(node.count, "leaf", "leaves")}\n${size(node.bytes)}, ${of}`);
    const leaf = leaves[node.leaf];
    return showTip(event, `${leaf.path}\n${leaf.what}\n${size(leaf.stored)}, ${of}, ${plural(leaf.chunks, "chunk")}`);
  });

  canvas.addEventListener("click", (event) => {
    let number = under(event);
    if (number === null || number === top) return;
    const leaf = nodes[number].leaf;
    while (nodes[number].parent !== top) number = nodes[number].parent;
    if (nodes[number].leaf < 0) go(number);
    else choose(leaf);
  });

  function go(number) {
    top = number;
    hideTip();
    const trail = [];
    for (let at = number; ; at = nodes[at].parent) {
      trail.unshift(at);
      if (at === 0) break;
    }
    crumbs.replaceChildren(...trail.map((at) => el("button", { type: "button", title: nodes[at].path || "all", onclick: () => go(at) }, at === 0 ? "all" : nodes[at].name)));
    crumbs.append(el("span", { class: "muted" }, `${size(nodes[top].bytes)}, ${plural(nodes[top].count, "leaf", "leaves")}`));
    redraw();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && top !== 0) go(nodes[top].parent);
  });

  const select = el("select", { onchange: () => { byDtype = select.value === "dtype"; legends.replaceChildren(legend(byDtype ? ofDtype : ofEntry)); redraw(); } },
    el("option", { value: "entry" }, "colour: top-level entry"), el("option", { value: "dtype" }, "colour: dtype"));
  legends.append(legend(ofEntry));
  const bar = el("div", { class: "bar" }, crumbs, el("span", { class: "grow" }), select);
  part("Where the bytes are", bar, canvas, legends, el("p", { class: "muted" }, "Click: a level down; on a leaf of this level: to its row in the table. Escape, or the path above: up. Tied leaves are stored once and take no room of their own."));
  go(0);
}
