"""All findings of a check, and the notes beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...base.text import fold_hosts, format_ranges, join_names
from . import link_findings, rank_findings
from .expected import expected_bandwidth, reduced
from .outliers import best, median
from .schema import LINK_METRICS, RANK_METRICS, Finding, Measurements, Metric, Nodes, counted, in_words, share

ITSELF = "--check-history compares it with its own former checks"
MUCH = 0.5  # of MPI's bandwidth
NEAR = 0.9  # of what the links carry, which is near enough
LARGE = 2**20  # bytes of an all-reduce that shows what the links carry
WHY = {
    "nccl": "does NCCL use the fast network? NCCL_DEBUG=INFO shows it",
    "gloo": "gloo uses TCP only; --interface names the network that it takes",
}


def find(measured: Measurements) -> list[Finding]:
    """Return what is odd: first what nodes should be excluded for, the worst first."""
    nodes = Nodes(measured.ranks)
    found = [*rank_findings.find(measured, nodes), *link_findings.find(measured, nodes), *incomplete(measured)]
    return sorted(found, key=lambda one: (not one.hosts, one.ratio, one.nodes))


def incomplete(measured: Measurements) -> list[Finding]:
    """Return the finding of an all-reduce that did not end."""
    if measured.incomplete_allreduce is None:
        return []
    size, through = measured.incomplete_allreduce
    words = f"an all-reduce of {in_words(size, 'B').replace('.0 ', ' ')} ended on {through} of "
    return [Finding("job", words + counted(len(measured.ranks), "rank"), (), ())]


def notes(measured: Measurements, backend: str) -> list[str]:
    """Return sentences that are no findings."""
    return [*beside_hardware(measured), *without_peers(measured), *beside_mpi(measured, backend),
            *beside_links(measured, backend)]


def beside_hardware(measured: Measurements) -> list[str]:
    """Return a line of what was measured next to what the hardware claims: alike nodes may all be slow.

    Figures are put beside the same claim of their own; where there are several claims, the worst share is told.
    """
    found = []
    for name, metric in (("large", LINK_METRICS["large"]), *RANK_METRICS.items()):
        groups: dict[float, list[float]] = {}
        for claim, value in beside_claims(name, metric, measured):
            groups.setdefault(claim, []).append(value)
        if groups:
            by, claim, value = min((median(values) / claim, claim, median(values)) for claim, values in groups.items())
            words = "links" if name == "large" else metric.words + " of a node" * (name == "memory")
            found.append(f"{words} {in_words(value, metric.unit)} of {in_words(claim, metric.unit)} ({share(by)})")
    return [f"next to what the hardware claims: {', '.join(found)}"] if found else [
        ("no data sheet of this hardware is known here: whether the figures are good cannot be said, only whether they "
         "are alike")]


def beside_claims(name: str, metric: Metric, measured: Measurements) -> Iterator[tuple[float, float]]:
    """Yield what is claimed with what was measured, the best of its passes: of links, of ranks, or of nodes.

    Of nodes it is the host's memory: its ranks measure at the same time, so that their figures are added. A link has
    the claim of the slower one of its ends.
    """
    of_ranks = {rank: claim[name] for rank, claim in measured.claims.items() if name in claim}
    of_nodes = {measured.ranks[rank].node: claim for rank, claim in of_ranks.items()}
    if name in LINK_METRICS:
        for link, passes in measured.links.get(name, {}).items():
            if passes and of_nodes.keys() >= {*link}:
                yield min(of_nodes[node] for node in link), best(metric, passes)
        return
    values = {rank: best(metric, passes) for rank, passes in measured.own.get(name, {}).items() if passes}
    if name == "memory":
        for node, ranks in Nodes(measured.ranks).ranks.items():
            if node in of_nodes and values.keys() >= {*ranks}:
                yield of_nodes[node], sum(values[rank] for rank in ranks)
        return
    for rank in values.keys() & of_ranks.keys():
        yield of_ranks[rank], values[rank]


def without_peers(measured: Measurements) -> list[str]:
    """Return sentences of what cannot be compared with others, and with what it can."""
    nodes = Nodes(measured.ranks)
    if len(measured.ranks) == 1:
        return [f"one rank: there is no other to compare it with; {ITSELF}"]
    found = []
    kinds = Counter(who.kind for who in measured.ranks)
    single = [rank for rank, who in enumerate(measured.ranks) if kinds[who.kind] == 1]
    if single and len(kinds) > 1:
        named = join_names([f"rank {rank} ({measured.ranks[rank].kind or measured.ranks[rank].device})"
                            for rank in single])
        found.append(f"no other rank is of the kind of {named}: {ITSELF}")
    if len(nodes.ranks) == 1:
        return [*found, f"one node: its ranks are compared with each other, the node with nothing; {ITSELF}"]
    if len(nodes.ranks) == 2 and measured.links:
        return [*found, f"two nodes: only the two directions of the link can be compared, not both; {ITSELF}"]
    same = Counter(nodes.kind.values())
    rare = [node for node, kind in nodes.kind.items() if same[kind] < 2]
    if rare and len(same) > 1:
        hosts = nodes.hosts(rare)
        named = fold_hosts(hosts) if len(hosts) == len(rare) else f"nodes {format_ranges(rare)}"
        found.append(f"no other node has such devices, or as many ranks: {named}. Its results have nothing to be "
                     f"compared with; {ITSELF}")
    return found


def beside_mpi(measured: Measurements, backend: str) -> list[str]:
    """Return lines where the backend is much slower than MPI between nodes, and where MPI does not come through."""
    found = []
    both = [link for link in measured.links.get("large", {}) if link in measured.by_mpi.get("large", {})]
    if both:
        ours, mpis = (median([max(of["large"][link]) for link in both]) for of in (measured.links, measured.by_mpi))
        if ours < MUCH * mpis:
            found.append(f"{backend} moves {in_words(ours, 'B/s')} from node to node, MPI {in_words(mpis, 'B/s')}: "
                         + WHY.get(backend, f"does {backend} use the fast network?"))
    hosts = {who.node: who.host for who in measured.ranks}
    silent = sorted({tuple(sorted(link)) for link in measured.links.get("latency", {})
                     if link not in measured.by_mpi.get("latency", {})})
    if silent:
        pairs = join_names([fold_hosts(hosts[node] for node in pair) for pair in silent])
        found.append(f"MPI does not come through between {pairs}, {backend} does")
    return found


def beside_links(measured: Measurements, backend: str) -> list[str]:
    """Return a line where gloo's all-reduce is below what the links carry, as it always is: no fault."""
    fastest = max((one.bus for one in reduced(measured) if one.size >= LARGE), default=0.0)
    links = expected_bandwidth(measured)
    if backend != "gloo" or not fastest or links is None or fastest > NEAR * links:
        return []
    words = f"gloo's all-reduce carries {in_words(fastest, 'B/s')}, the links {in_words(links, 'B/s')}"
    return [f"{words}: no fault, gloo adds up on the CPU"]
