// A table of any length: only the rows in sight are elements. Columns: { label, width, number, text(row), value(row) }.

const ROW = 26;

function grid(columns, rows, { height = 460, sort = null, descending = false, onRow = null } = {}) {
  const template = columns.map((column) => column.width || "1fr").join(" ");
  const space = el("div", { class: "space" });
  const body = el("div", { class: "body", tabIndex: 0 }, space);
  const head = el("div", { class: "head" });
  const box = el("div", { class: "grid", role: "table" }, head, body);
  head.style.gridTemplateColumns = template;
  let shown = rows;
  let by = sort;
  let down = descending;
  let chosen = null;

  const buttons = columns.map((column, i) => {
    const button = el("button", { type: "button", class: column.number ? "number" : "", title: "sort", onclick: () => sortBy(i) });
    head.append(button);
    return button;
  });

  function order() {
    if (by === null) return;
    const value = columns[by].value;
    const keys = new Map(shown.map((row) => [row, value(row)]));
    const sign = down ? -1 : 1;
    shown = [...shown].sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
  }

  function sortBy(i) {
    down = by === i ? !down : Boolean(columns[i].number);
    by = i;
    order();
    paint(true);
  }

  function paint(fromTop = false) {
    buttons.forEach((button, i) => {
      button.textContent = columns[i].label + (by === i ? (down ? " ↓" : " ↑") : "");
    });
    space.style.height = `${shown.length * ROW}px`;
    body.style.height = `${Math.min(height, Math.max(1, shown.length) * ROW)}px`;
    if (fromTop) body.scrollTop = 0;
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 6);
    const last = Math.min(shown.length, Math.ceil((body.scrollTop + height) / ROW) + 6);
    const made = [];
    for (let i = first; i < last; i++) {
      const row = shown[i];
      const cells = columns.map((column) => {
        const text = column.text(row);
        return el("span", { class: [column.number ? "number" : "", column.class ? column.class(row) : ""].join(" "), title: text }, text);
      });
      const line = el("div", { class: row === chosen ? "row chosen" : "row", role: "row" }, ...cells);
      line.style.gridTemplateColumns = template;
      line.style.top = `${i * ROW}px`;
      if (onRow) line.addEventListener("click", () => onRow(row));
      made.push(line);
    }
    space.replaceChildren(...made);
  }

  body.addEventListener("scroll", () => requestAnimationFrame(() => paint()));
  order();
  paint();
  return {
    box,
    filter(keep) {
      shown = rows.filter(keep);
      order();
      paint(true);
      return shown;
    },
    choose(row, scroll) {
      chosen = row;
      const at = shown.indexOf(row);
      if (scroll && at >= 0) body.scrollTop = Math.max(0, at * ROW - height / 2);
      paint();
    },
  };
}
