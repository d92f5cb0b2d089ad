"""Who shares a unit, and so who averages its gradient with whom.

Every unit is sharded over a group of ranks. By default that is all of them. A unit may be
given another group: an expert that lives on one rank, a layer that is shared inside a host
only. The group decides three things at once: over which ranks the weights are cut, which
ranks gather them, and over which ranks the gradient is averaged.

# Who averages with whom

Take four ranks. The root unit has no `process_group`, so all four average its gradient. A
layer given `process_group="set2"` is averaged by ranks 0 and 1 together, and by ranks 2 and
3 together. From the first step on there are two versions of that layer, one in each pair. A
layer given `process_group="self"` exists in four versions. That is what experts want, and
what a dense layer does not want.

Tip: A dense layer in a group smaller than the world drifts, and nothing stops it
    The ranks outside the group see other data, so they take other steps. The loss falls all the
    same. Give small groups to weights that are meant to differ, such as experts, and leave all
    others in the default group. [check_replicas][fsdp_ref.replicas.check_replicas] tells.

    Proof: process_groups/drift_of_a_dense_layer

# How to say a group

- `None`: all ranks.
- A `ProcessGroup` that this rank is a member of.
- A list of global ranks, this one among them. Each rank names its own group, so ranks 2 and
  3 say `[2, 3]` where ranks 0 and 1 say `[0, 1]`. The order in the list does not matter.
- A list of such lists, the same on every rank, in which each rank is once: `[[0, 1], [2, 3]]`.
  The lists may be of unequal length.
- A `DeviceMesh` of one dimension.
- A word, in either case. A word is the same on every rank, which makes it the easiest to
  get right.
- A pair of these, or a mesh of two dimensions, for [strategies][fsdp_ref.strategies] that cut
  within one group and copy across another.

These are the words:

| word | the groups | size of a group |
|---|---|---|
| `'self'`, `'set1'` | each rank alone | one |
| `'setK'` | blocks of K consecutive ranks | K |
| `'node'` | the ranks of one host | the local world size |
| `'modK'` | ranks that are equal modulo K | the world size divided by K |
| `'local_rank_across_nodes'` | the ranks with one local rank, across hosts | the number of hosts |

In `setK` the number is the size of a group. In `modK` it is the *number of groups*. Both must
divide the world size. Ask [table][fsdp_ref.process_groups.table] when in doubt; it needs no
processes:

    >>> print(table("mod2", world_size=8))
    mod2 on 8 ranks: 2 groups of 4
      0 2 4 6
      1 3 5 7

# A group for some modules only

A policy may return a dict of arguments for the unit that it selects, `process_group` among
them. All other units keep the arguments of the outermost constructor. The enclosing unit does
not hold the parameters of a unit inside it, so the two never average the same weight. Composer's
ways of saying the same, a mark on the module and `fsdp_wrap_fn`, work too; which of them wins is
said in [fsdp_ref.wrapping][].

Tip: Give experts their group through the policy, not by editing the model
    A policy that returns `{"process_group": "self"}` for one class changes these units and
    nothing else. The model's code knows nothing of it, and runs unsharded as before.

    Proof: process_groups/experts_through_a_policy

# Experts

A mixture of experts has weights that most tokens do not use. Each rank keeps one expert, or a few
ranks share one, and tokens travel to their expert and back by an all-to-all. An expert goes into
the group of the ranks that share it: `'self'`, or `'setK'` for K ranks. All else stays on all
ranks.

The gradient needs a second look. The backward of the all-to-all brings an expert the gradients of
*all* ranks' losses. Dividing their sum by the number of the expert's own ranks, as is the default,
makes it too large beside those of dense layers; nothing warns, and the loss may even fall faster
for a while. The right divisor is the number of all ranks: `gradient_divisor`, see
[fsdp_ref.options][]. Then the losses are those of a single process.

Tip: Divide the gradients of experts by the number of all ranks
    With the default divisor an expert trains as with a higher learning rate than the rest of the
    model. With `gradient_divisor=torch.distributed.get_world_size()` it trains as in one process.

    Proof: process_groups/mixture_of_experts

# Tensor parallelism

A pair of layers too large for one rank is cut: the first by columns, the second by rows. The
ranks of a host hold one piece each, share a batch, and add up their results. Each piece is the
same on the ranks of one local rank across hosts. So that is its group:
`'local_rank_across_nodes'`, or `'modK'` where K ranks hold the pair together. The default divisor
is right, since a piece sees the loss of each host's batch once.

Layers that are not cut stay on all ranks, and so does the last bias of a pair, which must be added
once. [clip_grad_norm_][fsdp_ref.FullyShardedDataParallel.clip_grad_norm_] counts every piece once
and every whole layer once: its norm is that of the model in one piece.

# Hybrid sharding

A group decides who shares; a *pair* of groups decides who shares and who holds copies. The first
one cuts, usually within a host, where links are fast; the second one averages the gradients of
copies, usually across hosts. The copies start equal, or the first forward is refused, and they
stay equal.
Say it by the strategy `HYBRID_SHARD` alone, with a pair of any of the above, or with a mesh of two
dimensions whose last one is the host.

# Groups are created late

Making a process group is itself a collective: all ranks of the world take part, also those
that stay outside, and in the same order. One group too many on one rank breaks the next group
on all. Cutting weights into shards needs only arithmetic. So a constructor notes the ranks
and makes nothing. When the outermost unit is set up, the ranks compare what all their units
asked for, and then make the union of it in one order. Equal sets of ranks share one group,
however they were spelt.

On a GPU each set of ranks gets a second group, for the reductions. NCCL pairs what two ranks
issue by its order alone, and ranks may issue a gather and a reduction in different orders.

Tip: Name groups as you like
    `'set4'`, `'mod1'` and the default are the same group on four ranks, and so is a list of all of
    them. There is one cache for all units and models. It goes when the default group is destroyed.

    Proof: process_groups/one_cache

If the ranks do not fit together, all of them get an error that names the unit and the ranks.
Without the comparison they would wait for each other.

# Pitfalls

- *A dense layer in a small group* drifts. A layer's group must contain all ranks that should agree
  on the layer. A group that merely contains this rank is enough to run, and not enough to be
  right. Ask [check_replicas][fsdp_ref.replicas.check_replicas], as
  [this run][drift-of-a-dense-layer] does.
- *The divisor.* A group gives its members equal weight and divides by their number. For experts
  that see tokens of all ranks, that is wrong: see [both numbers][mixture-of-experts].
- *K means two things.* `'set2'` makes groups of two ranks, `'mod2'` makes two groups. On four
  ranks these have equal sizes, so a mistake shows only on more. Print the table.
- *Each rank decides alone.* A word computed from a rank, or a list for some ranks only, would make
  ranks wait for each other; here it is an error on all of them: see
  [what each rank is told][groups-that-do-not-fit].
- *A full state dict* has one place for a layer that differs from group to group, so it is refused.
  Ask for all versions, or for this rank's; see [a run][versions-in-a-state-dict].
- *Hosts.* `'node'` and `'local_rank_across_nodes'` need to know how many processes run on each
  host. `torchrun` says so in the environment. Other launchers may not, and then these words are
  refused rather than guessed: see [a run][another-launcher].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref import agreement, rank_words
from fsdp_ref.errors import GroupMembershipError, GroupWordError, this_rank
from fsdp_ref.group_requests import Key, Misfit, request, union
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.rank_words import spell_lists

# For each default group; weak, so that destroying it drops its groups. They must not refer to it.
_caches: WeakKeyDictionary[ProcessGroup, dict[Key, ProcessGroup]] = WeakKeyDictionary()


def rank_lists(
    word: str | Sequence[Sequence[int]],
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> list[list[int]]:
    """Return the groups that a word means, as lists of global ranks. Local.

    Args:
        word: `'self'`, `'node'`, `'local_rank_across_nodes'`, `'setK'` or `'modK'`, in either
            case; or the lists themselves, to have them checked.
        world_size: Number of ranks; by default that of the default process group or, before
            there is one, what `torchrun` wrote into the environment.
        local_world_size: Number of ranks on each host; by default what `torchrun` wrote into
            the environment. Only `'node'` and `'local_rank_across_nodes'` read it.

    Returns:
        The groups in order of their lowest rank; each rank is in exactly one.

    Raises:
        GroupWordError: If the word is unknown, its number does not divide the world size, or a
            size is needed and unknown; or if lists leave out a rank, or name one twice.

    Examples:
        >>> rank_lists("set2", world_size=4)
        [[0, 1], [2, 3]]
        >>> rank_lists("mod2", world_size=4)
        [[0, 2], [1, 3]]
        >>> rank_lists("NODE", world_size=4, local_world_size=2)
        [[0, 1], [2, 3]]
        >>> rank_lists([[3, 1, 0], [2]], world_size=4)
        [[0, 1, 3], [2]]
    """
    where = f"process_group={word!r}"
    if world_size is None:
        world_size = _known_world_size(where)
    if world_size is None:
        raise GroupWordError.at(
            where,
            expected="the number of ranks",
            found="neither a process group nor WORLD_SIZE in the environment",
            fix="Give world_size.",
        )
    if isinstance(word, str):
        return rank_words.word_lists(word, world_size, local_world_size)
    return rank_words.checked_lists(word, world_size, where)


def _known_world_size(where: str) -> int | None:
    if dist.is_initialized():
        return dist.get_world_size()
    return rank_words.from_environment("WORLD_SIZE", where)


def table(
    word: str | Sequence[Any], world_size: int | None = None, local_world_size: int | None = None
) -> str:
    """Return a printable table of the groups that a word means. Local.

    Args:
        word: The word or the lists, as in [rank_lists][fsdp_ref.process_groups.rank_lists]; or a
            pair of such, the groups that share a copy and the groups that hold the others.
        world_size: Number of ranks; by default as in `rank_lists`.
        local_world_size: Number of ranks on each host; only some words need it.

    Returns:
        A heading and one line for each group.

    Raises:
        GroupWordError: If the word does not make groups of this world, or if the two of a pair
            are not the rows and columns of a grid.

    Examples:
        >>> print(table("local_rank_across_nodes", world_size=8, local_world_size=4))
        local_rank_across_nodes on 8 ranks: 4 groups of 2
          0 4
          1 5
          2 6
          3 7
        >>> print(table(("set2", "mod2"), world_size=4))
        cut within set2 on 4 ranks: 2 groups of 2
          0 1
          2 3
        copied across mod2 on 4 ranks: 2 groups of 2
          0 2
          1 3
    """
    if isinstance(word, str) or rank_words.is_lists(word) or len(word) != 2:
        return _table_of(word, rank_lists(word, world_size, local_world_size))
    shards, copies = (rank_lists(one, world_size, local_world_size) for one in word)
    rank_words.refuse_no_grid(shards, copies, f"process_group={word!r}")
    return f"cut within {_table_of(word[0], shards)}\ncopied across {_table_of(word[1], copies)}"


def _table_of(word: str | Sequence[Any], groups: list[list[int]]) -> str:
    sizes, world_size = [len(ranks) for ranks in groups], sum(map(len, groups))
    size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    count = f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {size}"
    heading = f"{word if isinstance(word, str) else 'lists'} on {world_size} rank"
    rows = ["  " + " ".join(map(str, ranks)) for ranks in groups]
    return "\n".join([f"{heading}{'s' if world_size > 1 else ''}: {count}", *rows])


def resolve(
    process_group: ProcessGroup | DeviceMesh | str | Sequence[Any] | None,
    *,
    where: str,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> RankGroup:
    """Turn a `process_group` argument into the ranks it means. Local: nothing is created.

    Args:
        process_group: `None` for all ranks, a live group, a mesh of one dimension, a word, a
            list of global ranks with this one among them, or a list of such lists in which
            each rank is once.
        where: Who asks, for messages, such as ``"unit 'layers.0'"``.
        world_size: Number of ranks; by default that of the default process group, or as
            `torchrun` says.
        local_world_size: Number of ranks on each host; by default as `torchrun` says.

    Returns:
        The ranks and this rank's place among them. Its group is live already for `None`, a
        `ProcessGroup` and a mesh, and otherwise once [create][fsdp_ref.process_groups.create]
        ran.

    Raises:
        GroupMembershipError: If this rank is not in the group, or if no process group exists
            that could tell the number of ranks.
        GroupWordError: If the word is unknown or does not divide the world, or if lists name
            ranks twice or ranks that do not exist, or leave out ranks.

    Examples:
        >>> resolve("set2", where="unit 'expert'", world_size=4).ranks
        (0, 1)
        >>> resolve([[1, 2], [3, 0]], where="unit 'expert'", world_size=4).ranks
        (0, 3)
    """
    if process_group is None:
        return _everyone(where)
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise GroupWordError.at(
                where,
                expected="a mesh of one dimension in this place",
                found=f"{process_group.ndim} dimensions",
                fix="Take a part of it, such as mesh['shard'].",
            )
        process_group = group_of_mesh(process_group, 0, where)
    if isinstance(process_group, ProcessGroup):
        return _of_live_group(process_group, where)
    outsider: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to non-members
    if process_group is outsider:
        raise _not_a_member("a group made without it", where)
    if world_size is None:
        world_size = _known_world_size(where) or _everyone(where).size
    asked = f"{where}, process_group={process_group!r}"
    if isinstance(process_group, str):
        lists = rank_words.word_lists(process_group, world_size, local_world_size, asked)
    elif rank_words.is_lists(process_group):
        lists = rank_words.checked_lists(process_group, world_size, asked)
        asked = f"{where}, process_group=lists {spell_lists(lists)}"
    else:
        lists = [rank_words.checked_ranks(process_group, world_size, asked)]
    ranks = next((ranks for ranks in lists if this_rank() in ranks), None)
    if ranks is None:
        named = lists[0] if len(lists) == 1 else spell_lists(lists)
        raise _not_a_member(f"the ranks {named}", where)
    return RankGroup(tuple(ranks), ranks.index(this_rank()), asked=asked)


def _everyone(where: str) -> RankGroup:
    if not dist.is_initialized():
        raise GroupMembershipError.at(
            where,
            expected="a default process group",
            found="none",
            fix="Call torch.distributed.init_process_group() before wrapping.",
        )
    world = distributed_c10d._get_default_group()
    return RankGroup(tuple(range(dist.get_world_size())), dist.get_rank(), world, asked=where)


def group_of_mesh(mesh: DeviceMesh, dim: int, where: str) -> ProcessGroup:
    """Return the live group that this rank has in one dimension of a mesh. Local.

    Args:
        mesh: The mesh.
        dim: Which of its dimensions.
        where: Who asks, for messages.

    Returns:
        The group.

    Raises:
        GroupMembershipError: If this rank is not in the mesh.
    """
    if mesh.get_coordinate() is None:
        raise _not_a_member(f"a mesh of the ranks {mesh.mesh.flatten().tolist()}", where)
    return mesh.get_group(dim)


def _of_live_group(group: ProcessGroup, where: str) -> RankGroup:
    if group not in distributed_c10d._world.pg_group_ranks:
        raise GroupMembershipError.at(
            where,
            expected="a live process group",
            found="one that was destroyed",
            fix="Make the group after the last destroy_process_group().",
        )
    ranks = dist.get_process_group_ranks(group)
    if this_rank() not in ranks:
        raise _not_a_member(f"a group of the ranks {ranks}", where)
    return RankGroup(
        tuple(ranks),
        ranks.index(this_rank()),
        group,
        asked=f"{where}, process_group=<group {group.group_name}>",
    )


def _not_a_member(group: str, where: str) -> GroupMembershipError:
    return GroupMembershipError.at(
        where,
        expected=f"a process group that rank {this_rank()} is in",
        found=group,
        fix="Each rank names the group that it belongs to itself; a word does so by itself.",
    )


def create(groups: Sequence[RankGroup], *, timeout: timedelta | None = None) -> None:
    """Make the live process groups that a tree of units asked for.

    Collective over the default process group: every rank calls this, with as many groups, in
    the same order of units. It costs one exchange of texts through the store, and the start of
    each group that does not exist yet. Equal sets of ranks share one group; the set of all
    ranks is the default group itself. Units whose backend pairs messages by their order get a
    second group for the reductions.

    Args:
        groups: One entry for each unit, in the order of units. Entries without a live group
            are given one.
        timeout: How long to wait for the other ranks; by default as long as the process group
            does.

    Raises:
        RankDisagreementError: On every rank, if ranks have different numbers of units, if a
            rank is in a group for which the other members did not ask at the same position, or
            if ranks that are to hold copies hold different shards.
        SilentRanksError: If a rank did not call this in time, naming it.
        GroupMembershipError: If there is no default process group.
    """
    world = _everyone("process_groups.create")
    missing: set[Key] = set()
    if world.size > 1:
        missing = _agree(groups, world.ranks, timeout)
    made = _caches.setdefault(world.live, {})
    live = {**made, Key(world.ranks, for_reductions=False): world.live}
    for key in sorted(missing - live.keys()):
        live[key] = made[key] = dist.new_group(key.ranks, timeout=agreement.time_limit())
    for group in groups:
        if group.process_group is None:
            group.process_group = live[Key(group.ranks, for_reductions=False)]
        group.reductions = live.get(Key(group.ranks, for_reductions=True))


def _agree(
    groups: Sequence[RankGroup], ranks: Sequence[int], timeout: timedelta | None
) -> set[Key]:
    """Tell all ranks what this one asks for; return what they ask for together."""
    requests = agreement.exchange("process groups", request(groups), ranks, timeout=timeout)
    try:
        return union(requests)
    except Misfit as misfit:
        words = json.dumps([group.asked for group in groups])
        heard = agreement.exchange("process groups/words", words, ranks, timeout=timeout)
        raise misfit.explain([json.loads(one) for one in heard]) from None
