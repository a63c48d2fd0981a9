// Runs in a page before its own scripts. It notes when the view was first shown, and replays the server's updates
// faster than they come: an hour of them within a minute.
(() => {
  const ready = Promise.withResolvers();
  const probe = { shownAt: null, overview: null, row: null, ready: ready.promise, replay };
  window.__probe = probe;
  const listeners = {};

  // The page follows the server by an EventSource: its listeners are kept, to be called again.
  window.EventSource = class extends EventSource {
    addEventListener(name, listener) {
      listeners[name] = listener;
      super.addEventListener(name, (event) => {
        if (name === "overview") probe.overview = JSON.parse(event.data);
        if (name === "sessions") probe.row = JSON.parse(event.data).rows.at(-1);
        if (probe.overview && probe.row) ready.resolve();
        listener(event);
      });
    }
  };

  new MutationObserver((_, observer) => {
    if (!document.querySelector("SELECTOR")) return;
    probe.shownAt = performance.now();
    observer.disconnect();
  }).observe(document, { subtree: true, childList: true });

  let replayed = 0;

  // A second's updates are four of rows, as often as the server looks at its log, and one of the strip. Each of rows
  // has 20 sessions with another turn, and one that is new. Each second is painted.
  async function replay(seconds) {
    for (let second = 0; second < seconds; second++) {
      for (let update = 0; update < 4; update++) {
        const now = Date.now() / 1000;
        const changed = ["followed", ...Array.from({ length: 19 }, (_, at) => `live-${at}`)];
        const rows = [...changed, `replayed-${replayed++}`].map((session_id) => ({
          ...probe.row,
          session_id,
          turns: replayed,
          version: 1_000_000 + replayed,
          updated_at: now,
          created_at: session_id.startsWith("replayed") ? now : probe.row.created_at,
          group_id: session_id.startsWith("replayed") ? "replayed" : probe.row.group_id,
        }));
        listeners.sessions({ data: JSON.stringify({ rows }), lastEventId: "" });
      }
      const { overview } = probe;
      listeners.overview({ data: JSON.stringify({ ...overview, at: overview.at + second, turns_per_s: second % 90 }) });
      await new Promise((painted) => requestAnimationFrame(painted));
    }
  }
})();
