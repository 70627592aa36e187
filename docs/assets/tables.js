// The theme puts each table in a box that scrolls sideways: whoever has no pointer must reach it.
document$.subscribe(() =>
  requestAnimationFrame(() => {
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "Table");
    }
  }),
);
