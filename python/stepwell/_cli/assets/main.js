// Puts the page together.

document.getElementById("title").textContent = data.path;
document.getElementById("subtitle").textContent = `written ${when(data.written)} by stepwell ${data.version}`;

if (data.root !== null) {
  rootHead(data.root);
  stepCharts(data.root);
  metricCharts(data.root);
  stepTable(data.root);
  if (data.root.advice !== null) adviceChart(data.root.advice);
}
if (data.unread !== null) part("No step could be opened", el("p", { class: "bad" }, data.unread));
if (data.checkpoint !== null) {
  const state = readState(data.checkpoint);
  let find = () => {};
  checkpointHead(data.checkpoint);
  if (state.nodes.length) treemap(state, (leaf) => find(leaf));
  dtypesAndItems(data.checkpoint, state);
  find = leafTable(state);
  fileStrips(state, (leaf) => find(leaf));
}
document.getElementById("main").append(el("footer", {}, "This file is complete: it asks for nothing from anywhere."));
