// The checkpoint: what it is, its dtypes and items, the table of its leaves.

// Columns of the data → objects, with what is drawn of them.
function readState(checkpoint) {
  const { leaf, node, chunk } = checkpoint;
  const leaves = leaf.path.map((path, i) => {
    const dtype = leaf.dtype[i] < 0 ? "object" : checkpoint.dtypes[leaf.dtype[i]];
    const shape = leaf.shape[i];
    return {
      number: i, path, dtype, shape: shape === null ? "" : `[${shape.join(", ")}]`, elements: shape === null ? 0 : shape.reduce((a, b) => a * b, 1),
      stored: leaf.stored[i], bytes: leaf.bytes[i], chunks: leaf.chunks[i], tied: leaf.tied[i], item: checkpoint.items[leaf.item[i]]?.name ?? "",
      what: shape === null ? "object" : `${dtype} [${shape.join(", ")}]`, lower: path.toLowerCase(),
    };
  });
  const nodes = node.parent.map((parent, i) => ({
    parent, name: node.name[i], kind: node.kind[i], leaf: node.leaf[i], children: [], bytes: 0, count: 0, path: "", entry: "", order: i,
  }));
  for (let i = nodes.length - 1; i >= 0; i--) {
    const one = nodes[i];
    if (one.leaf >= 0) [one.bytes, one.count] = [leaves[one.leaf].stored, 1];
    if (i > 0) {
      nodes[one.parent].bytes += one.bytes;
      nodes[one.parent].count += one.count;
      nodes[one.parent].children.push(i);
    }
  }
  nodes.forEach((one, i) => {
    one.children.sort((a, b) => nodes[b].bytes - nodes[a].bytes || a - b);
    if (i === 0) return;
    const above = nodes[one.parent];
    one.path = one.leaf >= 0 ? leaves[one.leaf].path : above.path + (above.path && !one.name.startsWith("[") ? "/" : "") + one.name;
    one.entry = one.parent === 0 ? one.name : above.entry;
  });
  if (nodes.length === 1 && nodes[0].leaf >= 0) nodes[0].entry = "the whole state";
  return { leaves, nodes, chunks: chunk, files: checkpoint.files };
}

function checkpointHead(checkpoint) {
  const metrics = Object.entries(checkpoint.metrics).slice(0, 6).map(([name, value]) => [name, figure(value)]);
  const facts = [
    checkpoint.step === null ? ["format", checkpoint.writer] : ["step", String(checkpoint.step)], ["committed", when(checkpoint.committed)], ["size", size(checkpoint.bytes)], ["leaves", counted(checkpoint.number_of_leaves)],
    ["data files", counted(checkpoint.files.length)], ["chunks", counted(checkpoint.chunk.leaf.length)], ...metrics,
  ];
  const made = part(checkpoint.step === null ? "Checkpoint" : `Step ${checkpoint.step}`, tiles(facts), el("p", { class: "muted mono" }, checkpoint.path));
  if (checkpoint.custom_metadata !== null) {
    made.append(el("p", { class: "muted" }, "custom metadata"), el("pre", {}, checkpoint.custom_metadata));
  }
}

function plainTable(columns, rows) {
  const cell = (tag) => (content, i) => el(tag, { class: columns[i].class || "" }, content);
  return el("table", {}, el("thead", {}, el("tr", {}, ...columns.map((column) => column.label).map(cell("th")))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td"))))));
}

function shareBar(part, whole) {
  const fill = el("i");
  fill.style.width = `${whole > 0 ? (100 * part) / whole : 0}%`;
  return el("div", { class: "share", title: share(part, whole) }, fill);
}

function dtypesAndItems(checkpoint, state) {
  const sums = new Map();
  for (const leaf of state.leaves) {
    const sum = sums.get(leaf.dtype) || { leaves: 0, elements: 0, bytes: 0 };
    sum.leaves += 1;
    sum.elements += leaf.tied < 0 ? leaf.elements : 0;
    sum.bytes += leaf.stored;
    sums.set(leaf.dtype, sum);
  }
  const whole = state.nodes[0]?.bytes ?? 0;
  const number = "number";
  const dtypes = [...sums.entries()].sort((a, b) => b[1].bytes - a[1].bytes)
    .map(([name, sum]) => [name, counted(sum.leaves), name === "object" ? "" : counted(sum.elements), size(sum.bytes), shareBar(sum.bytes, whole)]);
  const items = checkpoint.items.map((item) => {
    const bytes = state.leaves.reduce((sum, leaf) => sum + (leaf.item === item.name ? leaf.stored : 0), 0);
    return [item.name, el("span", { class: "mono" }, `${item.dir}/`), counted(item.leaves), size(bytes), shareBar(bytes, whole)];
  });
  for (const one of checkpoint.dropped) items.push([one.item, "", "", el("span", { class: "warn" }, `thinned away ${when(one.dropped)}`), ""]);
  const box = el("div", { class: "columns" },
    el("section", {}, el("h2", {}, "Dtypes"), plainTable([{ label: "dtype" }, { label: "leaves", class: number }, { label: "elements", class: number }, { label: "bytes", class: number }, { label: "share" }], dtypes)),
    el("section", {}, el("h2", {}, "Items"), plainTable([{ label: "item" }, { label: "directory" }, { label: "leaves", class: number }, { label: "bytes", class: number }, { label: "share" }], items)));
  document.getElementById("main").append(box);
}

function leafTable(state) {
  const { leaves } = state;
  const told = el("span", { class: "muted" });
  const search = el("input", { type: "search", placeholder: "filter by path, dtype or shape", oninput: () => apply() });
  const kinds = el("select", { onchange: () => apply() }, el("option", { value: "" }, "every dtype"));
  for (const dtype of [...new Set(leaves.map((leaf) => leaf.dtype))].sort()) kinds.append(el("option", { value: dtype }, dtype));
  const table = grid([
    { label: "path", width: "minmax(200px, 4fr)", text: (leaf) => leaf.path, value: (leaf) => leaf.path, class: () => "mono" },
    { label: "dtype", width: "minmax(80px, 1fr)", text: (leaf) => leaf.dtype, value: (leaf) => leaf.dtype },
    { label: "shape", width: "minmax(90px, 1.2fr)", text: (leaf) => leaf.shape, value: (leaf) => leaf.elements, class: () => "mono" },
    { label: "bytes", width: "90px", number: true, text: (leaf) => (leaf.tied >= 0 ? "tied" : size(leaf.stored)), value: (leaf) => leaf.stored },
    { label: "chunks", width: "70px", number: true, text: (leaf) => counted(leaf.chunks), value: (leaf) => leaf.chunks },
    { label: "item", width: "minmax(70px, .8fr)", text: (leaf) => (leaf.tied >= 0 ? `${leaf.item} = ${leaves[leaf.tied].path}` : leaf.item), value: (leaf) => leaf.item },
  ], leaves, { onRow: (leaf) => table.choose(leaf, false) });

  function apply() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const dtype = kinds.value;
    const found = table.filter((leaf) => (!dtype || leaf.dtype === dtype) && words.every((word) => leaf.lower.includes(word) || leaf.dtype.includes(word) || leaf.shape.includes(word)));
    told.textContent = `${plural(found.length, "leaf", "leaves")}, ${size(found.reduce((sum, leaf) => sum + leaf.stored, 0))}`;
  }

  const section = part("Leaves", el("div", { class: "bar" }, search, kinds, el("span", { class: "grow" }), told), table.box);
  apply();
  return (number) => {
    search.value = "";
    kinds.value = "";
    apply();
    table.choose(leaves[number], true);
    section.scrollIntoView({ block: "nearest", behavior: "smooth" });
  };
}
