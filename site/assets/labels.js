// Names for the controls that the theme leaves without one, so that a screen reader can say what
// they are. Some appear only after the page has loaded, hence the observer.
(function () {
  "use strict";

  var LABELS = [
    [".md-search[role='dialog']", function () { return "Search"; }],
    [".md-version__current", function (button) { return button.textContent.trim() + ", choose a version"; }],
    [".md-annotation__index", function () { return "Annotation"; }],
    ["nav.md-code__nav", function (nav, index) { return "Code block " + (index + 1); }],
    ["nav.md-path", function () { return "Breadcrumbs"; }]
  ];

  function label() {
    LABELS.forEach(function (entry) {
      document.querySelectorAll(entry[0]).forEach(function (element, index) {
        var text = entry[1](element, index);
        if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
      });
    });
    // A table or code block that scrolls sideways must be reachable with the keyboard.
    document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach(function (box) {
      if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    });
  }

  function start() {
    label();
    new MutationObserver(label).observe(document.body, { childList: true, subtree: true });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
