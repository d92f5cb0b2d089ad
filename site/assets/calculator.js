// The calculator of the memory page: the sums of tools/memory_model.py, which a test compares.
(function () {
  "use strict";

  var HYBRID = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"];
  var DROPPED = ["FULL_SHARD", "HYBRID_SHARD"];

  function cost(setup) {
    var size = setup.world_size;
    if (HYBRID.indexOf(setup.strategy) >= 0) size = Math.min(setup.ranks_per_host, setup.world_size);
    var copies = Math.floor(setup.world_size / size);
    var root = Math.ceil(setup.root / size), layer = Math.ceil(setup.layer / size);
    var shard = root + setup.layers * layer;
    var dropped = DROPPED.indexOf(setup.strategy) >= 0;
    var atOnce = dropped ? Math.min(setup.layers, 2) : setup.layers;
    var gathers = root + setup.layers * layer * (dropped ? 2 : 1);
    var reduced = shard * setup.reduce_bytes;
    return {
      shards: shard * 4,
      optimizer: shard * 4 * setup.optimizer_states,
      gradients: shard * 4,
      full: (root + atOnce * layer) * size * setup.compute_bytes,
      shared: (size - 1) * (gathers * setup.compute_bytes + reduced),
      copied: Math.floor(2 * (copies - 1) * reduced / copies)
    };
  }

  function inWords(bytes) {
    var units = ["bytes", "kB", "MB", "GB", "TB"], at = 0;
    while (bytes >= 1000 && at < units.length - 1) { bytes /= 1000; at += 1; }
    return (at ? bytes.toPrecision(3) : bytes) + " " + units[at];
  }

  function start(form) {
    var output = form.querySelector("tbody"), problem = form.querySelector("[role='alert']");

    function number(name) { return Number(form.elements[name].value); }

    function row(title, bytes, strong) {
      var line = document.createElement("tr");
      [title, inWords(bytes)].forEach(function (text) {
        var cell = document.createElement("td");
        cell.append(strong ? Object.assign(document.createElement("strong"), { textContent: text }) : text);
        line.append(cell);
      });
      line.dataset.bytes = bytes;
      output.append(line);
    }

    function update() {
      var setup = {
        root: number("root"), layer: number("layer"), layers: number("layers"),
        world_size: number("world_size"), ranks_per_host: number("ranks_per_host"),
        strategy: form.elements.strategy.value, compute_bytes: number("compute_bytes"),
        optimizer_states: number("optimizer_states"), reduce_bytes: 4
      };
      var counts = ["layers", "world_size", "ranks_per_host"];
      var wrong = counts.concat("root", "layer").some(function (name) {
        return !Number.isInteger(setup[name]) || setup[name] < (counts.indexOf(name) < 0 ? 0 : 1);
      }) || (HYBRID.indexOf(setup.strategy) >= 0 && setup.world_size % Math.min(setup.ranks_per_host, setup.world_size));
      problem.textContent = wrong ? "Use whole numbers; hosts of equal size must fill the world." : "";
      output.replaceChildren();
      if (wrong) return;
      var found = cost(setup), offload = form.elements.offload.checked;
      var resting = found.shards + found.optimizer;
      row("Parameter shards" + (offload ? " (host)" : ""), found.shards);
      row("State of the optimizer" + (offload ? " (host)" : ""), found.optimizer);
      row("Gradient shards" + (offload ? " (host)" : ""), found.gradients);
      row("Full parameters, at most", found.full);
      row("Device at rest", offload ? 0 : resting, true);
      row("Device at the peak", offload ? found.full : resting + found.gradients + found.full, true);
      if (offload) row("Host at the peak", resting + found.gradients, true);
      row("Sent in a step among ranks that share", found.shared);
      row("Sent in a step between copies", found.copied);
    }

    form.addEventListener("input", update);
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.cost = cost;
    update();
  }

  document.querySelectorAll("form.calculator").forEach(start);
})();
