// The step player: shows a recorded training step of four ranks, moment by moment. Its data was
// written by tools/steps; the sentence for each moment is read from the table below the drawing.
(function () {
  "use strict";

  var SVG = "http://www.w3.org/2000/svg";
  var SPEED_MS = 750;

  function make(tag, attributes, children) {
    var element = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (name) { element.setAttribute(name, attributes[name]); });
    (children || []).forEach(function (child) { element.append(child); });
    return element;
  }

  function draw(parent, tag, attributes, text) {
    var element = document.createElementNS(SVG, tag);
    Object.keys(attributes).forEach(function (name) { element.setAttribute(name, attributes[name]); });
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  function ofRank(value, rank) { return Array.isArray(value) ? value[rank] : value; }

  // What is in memory and on its way at each moment, for all ranks: one pass over the moments.
  function follow(way) {
    var state = way.units.map(function () { return { weights: "shard", gradient: "none" }; });
    var live = 0;
    return way.ticks.map(function (tick) {
      var unit = tick.unit === undefined ? null : state[tick.unit];
      if (unit) state[tick.unit] = unit = Object.assign({}, unit);
      if (tick.live !== undefined) live = tick.live;
      if (tick.what === "all-gather") unit.weights = "coming";
      else if (tick.what === "unshard") unit.weights = "whole";
      else if (tick.what === "reshard") unit.weights = "shard";
      else if (tick.what === "reduce-scatter" || tick.what === "all-reduce") unit.gradient = "going";
      else if (tick.what === "reduce-scatter done") unit.gradient = "shard";
      var moment = { units: state.slice(), live: live };
      return moment;
    });
  }

  function start(root) {
    var data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    var names = Object.keys(data);
    var ranks = Number(root.dataset.ranks);
    var stage = root.querySelector(".step-player__stage");
    var name = names[0], way, moments, now = 0, timer = null, table;

    function titleOf(key) {
      return detailsOf(key).querySelector("summary").textContent.split(": the same")[0];
    }

    function detailsOf(key) {
      return Array.from(root.querySelectorAll("details")).find(function (one) { return one.dataset.way === key; });
    }

    // --- The parts on the page.

    var choice = make("select", {}, names.map(function (key) { return make("option", { value: key }, [titleOf(key)]); }));
    var play = make("button", { type: "button", "data-do": "play" }, ["Play"]);
    var back = make("button", { type: "button", "data-do": "back", "aria-label": "One moment back" }, ["◀ Back"]);
    var next = make("button", { type: "button", "data-do": "next", "aria-label": "One moment on" }, ["On ▶"]);
    var scrub = make("input", { type: "range", min: 0, value: 0, step: 1, "aria-label": "Moment of the step" });
    var sentence = make("p", { "class": "step-player__now", "aria-live": "polite" });
    var note = make("p", { "class": "step-player__note" });
    var score = document.createElementNS(SVG, "svg");
    score.setAttribute("class", "step-player__score");
    score.setAttribute("aria-hidden", "true"); // the table says the same
    var lanes = make("div", { "class": "step-player__ranks" });
    stage.append(
      make("div", { "class": "step-player__controls" }, [
        make("label", {}, ["Strategy ", choice]), back, play, next
      ]),
      note, score, scrub, sentence, lanes,
      make("p", { "class": "step-player__key" }, [
        "Each bar is a unit as this rank has it, one colour for each rank's piece: filled is in memory, striped " +
        "is on its way. The thin bar below it is the gradient. “In memory” counts this rank's shards and full " +
        "parameters; gradients and the optimizer come on top. Distances are moments, not times."
      ])
    );

    // --- The overview: units over moments, and the bytes of full parameters.

    function overview() {
      var count = way.ticks.length, width = 800, row = 20, left = 64;
      var height = way.units.length * row + 46;
      var x = function (index) { return left + (width - left) * index / count; };
      score.replaceChildren();
      score.setAttribute("viewBox", "0 0 " + width + " " + height);
      score.setAttribute("preserveAspectRatio", "none");
      var pattern = draw(draw(score, "defs", {}), "pattern", {
        id: "step-stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"
      });
      draw(pattern, "path", { d: "M0 0V6", "stroke-width": 4 });
      way.units.forEach(function (unit, index) {
        var y = index * row + 4;
        draw(score, "text", { x: 4, y: y + 11 }, unit.name);
        moments.forEach(function (moment, at) {
          var weights = moment.units[index].weights;
          var box = { x: x(at), width: x(1) - x(0) + 0.3, y: y, height: 9 };
          if (weights === "whole") draw(score, "rect", Object.assign({ "class": "whole" }, box));
          if (weights === "coming") draw(score, "rect", Object.assign({ "class": "gather" }, box));
          if (moment.units[index].gradient === "going") {
            draw(score, "rect", Object.assign({ "class": "reduce" }, box, { y: y + 11, height: 5 }));
          }
        });
      });
      var most = 1;
      moments.forEach(function (moment) {
        for (var rank = 0; rank < ranks; rank++) most = Math.max(most, ofRank(moment.live, rank));
      });
      draw(score, "text", { x: 4, y: height - 10 }, "full bytes");
      moments.forEach(function (moment, at) {
        var tall = 36 * ofRank(moment.live, 0) / most;
        draw(score, "rect", { "class": "live", x: x(at), width: x(1) - x(0), y: height - 4 - tall, height: tall });
      });
      way.ticks.forEach(function (tick, at) {
        if (tick.unit === undefined) draw(score, "line", { "class": "phase", x1: x(at), x2: x(at), y1: 0, y2: height });
      });
      score.playhead = draw(score, "line", { "class": "now", y1: 0, y2: height });
      score.place = function (at) { return x(at + 0.5); };
      score.find = function (share) { return Math.floor((share * width - left) / (width - left) * count); };
    }

    // --- The lanes: one for each rank.

    function pieces(kind, unit, rank) {
      return make("span", { "class": "step-player__pieces " + kind }, unit.ranks[rank].map(function (owner) {
        return make("i", { style: "--piece: var(--rank-" + owner + ")", "data-owner": owner });
      }));
    }

    function buildLanes() {
      lanes.replaceChildren();
      for (var rank = 0; rank < ranks; rank++) {
        var lane = make("div", { "class": "step-player__rank", style: "--own: var(--rank-" + rank + ")" }, [
          make("strong", {}, ["rank " + rank])
        ]);
        way.units.forEach(function (unit) {
          lane.append(make("div", { "class": "step-player__unit" }, [
            make("span", {}, [unit.name]), pieces("weights", unit, rank), pieces("gradient", unit, rank)
          ]));
        });
        lane.append(make("span", { "class": "step-player__bytes" }), make("div", { "class": "step-player__live" }, [make("b")]));
        lanes.append(lane);
      }
    }

    function restOf(rank) {
      return way.units.reduce(function (sum, unit) { return sum + ofRank(unit.rest, rank); }, 0);
    }

    function showLane(lane, rank, moment, most) {
      lane.querySelectorAll(".step-player__unit").forEach(function (row, index) {
        var unit = moment.units[index];
        row.querySelectorAll(".weights i").forEach(function (piece) {
          var own = Number(piece.dataset.owner) === rank;
          piece.className = own || unit.weights === "whole" ? "here" : unit.weights === "coming" ? "coming" : "";
        });
        row.querySelector(".gradient").classList.toggle("active", unit.gradient !== "none");
        row.querySelectorAll(".gradient i").forEach(function (piece) {
          var own = Number(piece.dataset.owner) === rank;
          piece.className = unit.gradient === "going" ? "coming" : unit.gradient === "shard" && own ? "here" : "";
        });
      });
      var bytes = restOf(rank) + ofRank(moment.live, rank);
      lane.querySelector(".step-player__bytes").textContent = "in memory: " + bytes.toLocaleString("en") + " bytes";
      lane.querySelector(".step-player__live b").style.width = 100 * bytes / most + "%";
    }

    // --- Moving.

    function show(index) {
      now = Math.max(0, Math.min(way.ticks.length - 1, index));
      var moment = moments[now], row = table.tBodies[0].rows[now];
      var most = 1;
      moments.forEach(function (one) {
        for (var rank = 0; rank < ranks; rank++) most = Math.max(most, restOf(rank) + ofRank(one.live, rank));
      });
      Array.from(lanes.children).forEach(function (lane, rank) { showLane(lane, rank, moment, most); });
      scrub.value = now;
      scrub.setAttribute("aria-valuetext", "moment " + now + ": " + row.cells[1].textContent);
      var sent = row.cells[3].textContent;
      sentence.replaceChildren(
        row.cells[1].textContent,
        make("small", {}, ["moment " + now + " of " + (way.ticks.length - 1) +
          (sent ? " · groups " + row.cells[2].textContent + " · a rank sends " + sent + " bytes" : "")])
      );
      Array.from(table.tBodies[0].rows).forEach(function (one) { one.removeAttribute("aria-current"); });
      row.setAttribute("aria-current", "step");
      score.playhead.setAttribute("x1", score.place(now));
      score.playhead.setAttribute("x2", score.place(now));
      back.disabled = now === 0;
      next.disabled = now === way.ticks.length - 1;
      if (next.disabled) pause();
    }

    function pause() {
      if (timer) clearInterval(timer);
      timer = null;
      play.textContent = "Play";
      sentence.setAttribute("aria-live", "polite");
    }

    function toggle() {
      if (timer) { pause(); return; }
      if (now === way.ticks.length - 1) show(0);
      sentence.setAttribute("aria-live", "off"); // a screen reader could not keep up
      play.textContent = "Pause";
      timer = setInterval(function () { show(now + 1); }, SPEED_MS);
    }

    function choose(key) {
      pause();
      name = key;
      names.forEach(function (other) { detailsOf(other).hidden = other !== key; });
      way = data[name];
      moments = follow(way);
      table = detailsOf(name).querySelector("table");
      note.textContent = detailsOf(name).querySelector("p").textContent;
      scrub.max = way.ticks.length - 1;
      overview();
      buildLanes();
      show(0);
    }

    choice.addEventListener("change", function () { choose(choice.value); });
    play.addEventListener("click", toggle);
    back.addEventListener("click", function () { pause(); show(now - 1); });
    next.addEventListener("click", function () { pause(); show(now + 1); });
    scrub.addEventListener("input", function () { pause(); show(Number(scrub.value)); });
    score.addEventListener("click", function (event) {
      var box = score.getBoundingClientRect();
      pause();
      show(score.find((event.clientX - box.left) / box.width));
    });
    stage.addEventListener("keydown", function (event) {
      if (event.target.tagName !== "BUTTON") return; // the slider and the list have keys of their own
      if (event.key === "ArrowLeft") { pause(); show(now - 1); }
      else if (event.key === "ArrowRight") { pause(); show(now + 1); }
      else return;
      event.preventDefault();
    });
    choose(name);
  }

  document.querySelectorAll(".step-player").forEach(start);
})();
