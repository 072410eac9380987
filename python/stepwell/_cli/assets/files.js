// Where each chunk lies: a strip per data file, its chunks coloured so that neighbouring leaves differ.

const STRIP = 26;
const FILES_AT_ONCE = 24;

function fileStrips(state, choose) {
  const { files, chunks, leaves } = state;
  if (!files.length) return;
  const inside = files.map(() => []);
  chunks.file.forEach((file, i) => file >= 0 && inside[file].push(i));
  for (const list of inside) list.sort((a, b) => chunks.offset[a] - chunks.offset[b]);
  const box = el("div");
  let shown = 0;
  const more = el("button", { type: "button", onclick: () => show() });

  function show() {
    const to = Math.min(files.length, shown + FILES_AT_ONCE);
    for (; shown < to; shown++) box.append(strip(shown));
    more.hidden = shown === files.length;
    more.textContent = `show more files (${counted(files.length - shown)} left)`;
  }

  function strip(number) {
    const file = files[number];
    const list = inside[number];
    const whole = Math.max(file.bytes, 1);
    // Leaves take colours in the order in which they come in the file.
    const order = new Map();
    for (const i of list) if (!order.has(chunks.leaf[i])) order.set(chunks.leaf[i], order.size);
    // What is in sight: dragging over a part zooms into it, a double click shows all again.
    let [from, to] = [0, whole];
    const { canvas, redraw } = drawing(STRIP, (g, width, height) => {
      const tints = [...Array(COLOURS).keys()].map((i) => colour(`c${i}`));
      g.fillStyle = colour("soft");
      g.fillRect(0, 0, width, height);
      const scale = width / (to - from);
      for (const i of list) {
        const x = (chunks.offset[i] - from) * scale;
        const w = chunks.bytes[i] * scale;
        if (x + w < 0 || x > width) continue;
        g.fillStyle = tints[order.get(chunks.leaf[i]) % COLOURS];
        // Thinner than a pixel: whole pixels, so that colours stay what they are.
        if (w < 1) g.fillRect(Math.floor(x), 0, 1, height);
        else g.fillRect(x, 0, w > 3 ? w - 0.6 : w, height);
      }
    }, { class: "click" });

    // The chunks below the pointer: often several, where they are thinner than a pixel.
    const byteAt = (event) => {
      const box = canvas.getBoundingClientRect();
      return from + ((event.clientX - box.left) / box.width) * (to - from);
    };

    function under(event) {
      const first = byteAt(event);
      const last = first + (to - from) / canvas.clientWidth;
      let [low, high] = [0, list.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (chunks.offset[list[middle]] + chunks.bytes[list[middle]] <= first) low = middle + 1;
        else high = middle;
      }
      const found = [];
      while (low < list.length && chunks.offset[list[low]] < last) found.push(list[low++]);
      return [found, first];
    }

    canvas.addEventListener("mousemove", (event) => {
      const [found, at] = under(event);
      if (!found.length) return showTip(event, `${file.path}, byte ${counted(Math.floor(at))}\nheader, padding, checksums or index`);
      const i = found[0];
      const leaf = leaves[chunks.leaf[i]];
      const others = found.length > 1 ? `\nand ${plural(found.length - 1, "more chunk")} below this pixel` : "";
      return showTip(event, `${leaf.path}\n${leaf.what}\nbytes ${counted(chunks.offset[i])} … ${counted(chunks.offset[i] + chunks.bytes[i])}: ${size(chunks.bytes[i])} of ${size(leaf.stored)}${others}`);
    });
    let pressed = null;
    canvas.addEventListener("mousedown", (event) => (pressed = [event.clientX, byteAt(event)]));
    canvas.addEventListener("mouseup", (event) => {
      if (pressed === null) return;
      const [x, begin] = pressed;
      pressed = null;
      if (Math.abs(event.clientX - x) > 4) {
        const end = byteAt(event);
        [from, to] = [Math.max(0, Math.min(begin, end)), Math.min(whole, Math.max(begin, end))];
        redraw();
        return;
      }
      const [found] = under(event);
      if (found.length) choose(chunks.leaf[found[0]]);
    });
    canvas.addEventListener("dblclick", () => {
      [from, to] = [0, whole];
      redraw();
    });
    return el("div", { class: "strip" },
      el("span", { class: "mono" }, file.path, el("br"), el("span", { class: "muted" }, `${file.item}, ${plural(list.length, "chunk")}`)),
      canvas, el("span", { class: "number" }, size(file.bytes)));
  }

  show();
  part("Where each chunk lies", box, more, el("p", { class: "muted" }, "One strip per data file, from its first byte to its last; leaves take turns in colour. What is grey holds no leaf: header, padding, checksums, index. Click a chunk to find its leaf in the table; drag over a part to zoom in, double-click to see all."));
}
