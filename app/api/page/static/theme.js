/** The theme that was chosen here, before the page is painted: not a module, so that it runs first. */
(() => {
  const chosen = localStorage.getItem("turnlog-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
