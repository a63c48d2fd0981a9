/** Before the page is painted: the theme that was chosen here, else the system's. Not a module, so that it runs first. */
(() => {
  const chosen = localStorage.getItem("turnlog-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
