"""Which nodes of a cluster get packs. Nodes that are about to leave, run other code, have another model of GPU or fail
repeatedly get none."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping

PACK_FAILURES = 3  # a node is blocked after this many failed packs in a row, if other nodes work
START_FAILURES = 3  # a node is refused after a slot failed to start there this often, if none started meanwhile
STARTS_WITHIN_S = 300.0  # a new node on which no slot has started within this time is assumed to be used by other jobs
log = logging.getLogger("fedsweep")


class NodeHealth:
    """What the driver has learned about the nodes since it started. Nodes are identified by Ray's ids; `names` are for
    messages."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.usable: set[str] = set()
        """Nodes that are large enough for a federation, or for one host if hosts are spread; blocked nodes included."""
        self.lost: set[str] = set()
        """Nodes that have left the cluster."""
        self.leaving: set[str] = set()
        """Nodes that are about to leave the cluster."""
        self.refused: dict[str, str] = {}
        """Nodes that get no packs while this driver runs, with the reason: they run other code, have another
        model of GPU, or start no slot."""
        self._unreliable: set[str] = set()
        """Nodes on which packs failed repeatedly while there were other nodes; used again if no other node is left."""
        self._blocked_once: set[str] = set()
        """Nodes that `block_once` has blocked."""
        self._failed_packs: dict[str, set[int]] = {}
        """The packs that failed on a node since the last success there."""
        self._failed_starts: dict[str, Counter[str]] = {}
        """Failed starts by node and slot, since a slot last started on the node."""
        self._accelerator = ""
        """The model of GPU that all slots of this driver use: that of the first one."""
        self._first_seen: dict[str, float] = {}
        """When each node was first usable, on the clock of `time.monotonic`."""
        self._has_started: set[str] = set()
        """Nodes on which a slot has taken a pack."""

    def name(self, node: str) -> str:
        return self.names.get(node, node)

    @property
    def blocked(self) -> set[str]:
        """Nodes that are refused or unreliable."""
        return self._unreliable | self.refused.keys()

    @property
    def excluded(self) -> set[str]:
        """Nodes that get no packs now: they are blocked or about to leave."""
        return self.blocked | self.leaving

    @property
    def starting(self) -> set[str]:
        """Nodes that are new, and whose first slot may still start."""
        now = time.monotonic()
        return {node for node in self.usable - self._has_started if now - self._first_seen[node] < STARTS_WITHIN_S}

    def suspected(self, failures: int) -> set[str]:
        """Nodes on which this many packs have failed, and none has ended since."""
        return {node for node, failed in self._failed_packs.items() if len(failed) >= failures}

    @property
    def no_node_left(self) -> str:
        """The reason if every node of the cluster is refused; otherwise empty."""
        if not self.usable or not self.usable <= self.refused.keys():
            return ""
        return "; ".join(dict.fromkeys(self.refused[node] for node in sorted(self.usable)))

    def update(self, names: Mapping[str, str], usable: Iterable[str], lost: set[str], leaving: set[str]) -> None:
        """Take over what the cluster reports about its nodes."""
        self.names.update(names)
        self.usable = set(usable)
        for node in self.usable:
            self._first_seen.setdefault(node, time.monotonic())
        if new := lost - self.lost:
            log.info("lost: node %s; its packs are retried without counting as failed", self._list(new))
        if new := leaving - self.leaving:
            log.warning("about to leave the cluster: node %s; its packs are handed back", self._list(new))
        self.lost |= lost
        self.leaving = set(leaving)

    def _list(self, nodes: Iterable[str]) -> str:
        return ", ".join(sorted(map(self.name, nodes)))

    # ---- failures

    def refuse_different_code(self, node: str, differences: str) -> None:
        self._refuse(node, f"node {self.name(node)} has other code than the driver: {differences}")

    def has_other_accelerator(self, node: str, accelerator: str) -> bool:
        """Whether the node's model of GPU differs from that of the first slot. If so, the node is refused."""
        if accelerator and not self._accelerator:
            self._accelerator = accelerator
            log.info("accelerator: %s", accelerator)
        if accelerator in ("", self._accelerator):
            return False
        models = f"{accelerator} instead of {self._accelerator}"
        choose = "resources.accelerator chooses one"
        self._refuse(node, f"node {self.name(node)} has another accelerator than the first one: {models}; {choose}")
        return True

    def start_failed(self, node: str, slot: str, reason: str) -> None:
        """A slot did not start. `node`: empty if it is not known; the failure then counts against all nodes."""
        failed = self._failed_starts.setdefault(node, Counter())
        failed[slot] += 1
        if node and failed[slot] >= START_FAILURES:
            self._refuse(node, f"on node {self.name(node)} no slot starts: {reason}")
        elif failed[slot] >= START_FAILURES * len(self.usable):
            for each in self.usable:
                self._refuse(each, f"no slot starts on any node: {reason}")

    def _refuse(self, node: str, reason: str) -> None:
        if node not in self.refused:
            self.refused[node] = reason
            log.warning("%s; the node gets no packs", reason)

    def pack_failed(self, node: str, pack: int, others_work: bool) -> None:
        """`pack`: the pack's `origin`. `others_work`: whether any pack has succeeded, and other nodes run packs."""
        failed = self._failed_packs.setdefault(node, set())
        failed.add(pack)
        if len(failed) >= PACK_FAILURES and others_work and node not in self.blocked:
            self._unreliable.add(node)
            log.warning("node %s has failed %d packs in a row and gets no more", self.name(node), len(failed))

    def block_once(self, node: str) -> bool:
        """Block a node if there are others and this method has not blocked it before. Returns whether this call has
        blocked it."""
        if node in self._blocked_once or not self.usable - self.excluded - {node}:
            return False
        self._blocked_once.add(node)
        self._unreliable.add(node)
        log.warning("node %s has failed a pack repeatedly and gets no more", self.name(node))
        return True

    def slot_started(self, node: str) -> None:
        self._has_started.add(node)
        for each in (node, ""):
            self._failed_starts.pop(each, None)

    def pack_ended(self, node: str) -> None:
        self._failed_packs.pop(node, None)

    def clear_unreliable(self) -> bool:
        """Use unreliable nodes again. Returns whether there were any."""
        had_any = bool(self._unreliable)
        if had_any:
            log.warning("no other node is left: unreliable nodes get packs again")
        self._unreliable.clear()
        self._failed_packs.clear()
        return had_any
