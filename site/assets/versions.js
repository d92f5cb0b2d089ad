// A bar on every page of a version that is not the latest, with a link to the same page there.
// Which version this is, and which others there are, the site's own versions.json says.
(function () {
  "use strict";

  var config = JSON.parse(document.getElementById("__config").textContent);
  var version = config.version;
  if (!version || version.provider !== "mike" || location.protocol === "file:") return;
  var base = new URL(config.base + "/", location.href); // the top of this version
  var own = base.pathname.split("/").filter(Boolean).pop();
  var alias = version.default || "latest";
  var page = location.pathname.slice(base.pathname.length);

  function link(href, text) {
    var anchor = document.createElement("a");
    anchor.href = href;
    anchor.textContent = text;
    return anchor;
  }

  function show(latest, target) {
    var bar = document.createElement("aside");
    bar.className = "not-latest";
    bar.setAttribute("aria-label", "Version");
    bar.append(
      own === "dev" ? "This is the development version, not a release. "
        : "This is version " + own + ", and not the latest. ",
      link(target, "Go to version " + latest), "."
    );
    document.querySelector(".md-container").prepend(bar);
  }

  // The page may be missing there: the sitemap of the latest version says so without an error.
  function find(latest) {
    var top = new URL("../" + alias + "/", base);
    fetch(new URL("sitemap.xml", top)).then(function (answer) {
      return answer.ok ? answer.text() : "";
    }).then(function (sitemap) {
      var known = sitemap.indexOf("/" + alias + "/" + page + "</loc>") >= 0;
      show(latest, new URL(known ? page : "", top).href);
    });
  }

  fetch(new URL("../versions.json", base)).then(function (answer) {
    return answer.ok ? answer.json() : [];
  }).then(function (versions) {
    var latest = versions.find(function (entry) { return entry.aliases.indexOf(alias) >= 0; });
    if (latest && own !== latest.version && own !== alias) find(latest.version);
  }).catch(function () { /* not served by mike: there is only this version */ });
})();
