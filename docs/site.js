// Code and tables that scroll are reached by the Tab key, so that keys scroll them. The theme leaves tables out, and code
// on screens without a mouse.
const reach = () => {
  for (const each of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (each.scrollWidth > each.clientWidth && !each.hasAttribute("tabindex")) each.tabIndex = 0;
};
new MutationObserver(reach).observe(document.body, { attributeFilter: ["tabindex"], childList: true, subtree: true });
addEventListener("resize", reach);
reach();
