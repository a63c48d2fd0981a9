// Runs in a page before its own scripts: when the list is shown and answers, what its rows say and since when, and
// which tasks held it up. The rows are read from the document, as somebody who looks at it would.
(() => {
  const ROW = "table.virtual tr[data-key]";
  const answered = Promise.withResolvers();
  const probe = { answered: answered.promise, tasks: [], shown: {} };
  window.__probe = probe;
  let column = -1;

  function turnsOf(row) {
    if (column < 0) {
      const heads = [...row.closest("table").querySelectorAll("thead th")];
      column = heads.findIndex((one) => one.textContent === "Turns");
    }
    return Number(row.cells[column].textContent.replaceAll(",", ""));
  }

  function rowsIn(record) {
    const target = record.target.nodeType === Node.ELEMENT_NODE ? record.target : record.target.parentElement;
    const own = target?.closest(ROW);
    if (own) return [own];
    return [...record.addedNodes].flatMap((node) =>
      node.nodeType !== Node.ELEMENT_NODE ? [] : node.matches(ROW) ? [node] : [...node.querySelectorAll(ROW)],
    );
  }

  function see(row, at) {
    if (!row.isConnected) return;
    const turns = turnsOf(row);
    const seen = (probe.shown[row.dataset.key] ??= []);
    if (!seen.length || seen[seen.length - 1][0] !== turns) seen.push([turns, at]);
  }

  new MutationObserver((records) => {
    const at = performance.timeOrigin + performance.now();
    for (const row of new Set(records.flatMap(rowsIn))) see(row, at);
  }).observe(document, { subtree: true, childList: true, characterData: true });
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) probe.tasks.push([entry.startTime, entry.duration]);
  }).observe({ type: "longtask", buffered: true });
  document.addEventListener(
    "input",
    () => requestAnimationFrame(() => setTimeout(() => answered.resolve(performance.now()))),
    true,
  );
})();
