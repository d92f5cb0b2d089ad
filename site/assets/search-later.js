// Loads the search only when a reader turns to it. The theme fetches the index of the whole site,
// and a worker to search it, with every page; both are larger than the page. This script runs
// before the theme's and holds these two requests back. Without it, search works all the same.
(function () {
  "use strict";

  var wanted = /[?&](q|h)=/.test(location.search) || location.protocol === "file:";
  var waiting = [];

  function whenWanted(action) {
    if (wanted) action();
    else waiting.push(action);
  }

  function want() {
    if (wanted) return;
    wanted = true;
    waiting.splice(0).forEach(function (action) { action(); });
  }

  // The index.
  var open = XMLHttpRequest.prototype.open;
  var send = XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.open = function (method, url) {
    this.isSearchIndex = String(url).indexOf("/search/search_index.json") >= 0;
    return open.apply(this, arguments);
  };
  XMLHttpRequest.prototype.send = function (body) {
    var request = this;
    if (request.isSearchIndex) whenWanted(function () { send.call(request, body); });
    else send.call(request, body);
  };

  // The worker: a stand-in that keeps messages and listeners until there is a real one.
  var RealWorker = window.Worker;
  function LaterWorker(url) {
    var worker = this;
    worker.calls = [];
    whenWanted(function () {
      worker.real = new RealWorker(url);
      worker.calls.splice(0).forEach(function (call) { worker.real[call[0]].apply(worker.real, call[1]); });
    });
  }
  ["postMessage", "addEventListener", "removeEventListener", "terminate"].forEach(function (name) {
    LaterWorker.prototype[name] = function () {
      if (this.real) this.real[name].apply(this.real, arguments);
      else this.calls.push([name, arguments]);
    };
  });
  window.Worker = function (url) {
    return /workers\/search\b/.test(String(url)) ? new LaterWorker(url) : new RealWorker(url);
  };

  // A reader turns to the search: with the mouse, by touch, with Tab, or with its keys.
  ["focusin", "pointerover", "pointerdown"].forEach(function (name) {
    document.addEventListener(name, function (event) {
      if (event.target.closest && event.target.closest(".md-search, [for='__search']")) want();
    });
  });
  document.addEventListener("keydown", function (event) {
    if (event.key === "/" || event.key === "s" || event.key === "f") want();
  });
})();
