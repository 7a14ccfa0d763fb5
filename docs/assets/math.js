// Settings of MathJax (mathjax/tex-svg.js, 3.2.2, Apache-2.0), read before it starts.  Only formulas of the pages are set;
// the menu is off because its parts would be loaded from elsewhere.
window.MathJax = {
  tex: {inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]]},
  options: {ignoreHtmlClass: ".*", processHtmlClass: "arithmatex", enableMenu: false},
  svg: {fontCache: "global"},
};
