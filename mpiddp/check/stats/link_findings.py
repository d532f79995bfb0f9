"""What is odd about the links between nodes: a switch, a node as it sends and receives, a single link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ...base.text import fold_hosts
from .outliers import Score, compare, median, odd
from .schema import (
    LINK_METRICS,
    SYMMETRIC,
    Finding,
    Link,
    Measurements,
    Metric,
    Nodes,
    Passes,
    counted,
    in_words,
    share,
)
from .tournament import cut_off, main_part, partners

SENDS, RECEIVES = 0, 1  # the node's place in a link
VERBS = ("sends", "receives")


class NodeScore(NamedTuple):
    """How a node sends or receives, and over how many links that was seen."""

    score: Score
    links: int


class Odd(NamedTuple):
    """What is odd in one metric: nodes with their roles, and links between other nodes."""

    nodes: dict[int, dict[int, NodeScore]]
    links: dict[Link, Score]


def find(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return what is odd about the links between nodes.

    Links of a node that is odd in anything are not reported: whoever excludes the node loses them.
    """
    found = unreachable(measured, nodes)
    for name, values in measured.links.items():
        links = {link: passes for link, passes in values.items() if passes}
        if links:
            outliers = outliers_of(LINK_METRICS[name], links, nodes, name in SYMMETRIC)
            found += describe(name, outliers, links, nodes)
    bad = {node for one in found if one.subject != "link" for node in one.nodes}
    return [one for one in found if one.subject != "link" or not bad & {*one.nodes}]


def unreachable(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return what follows from pairs between which nothing came through: nodes that are cut off, or links."""
    met = {(min(link), max(link)) for links in measured.links.values() for link, passes in links.items() if passes}
    failed = partners(measured.unreachable)
    count = len(failed.keys() | partners(met))
    several = {node for node, others in failed.items() if len(others) > 1}
    if several and not main_part(met, count):
        words = f"{counted(len(several), 'node')}: nothing comes through between them"
        return [Finding("node", words, (), tuple(sorted(several)))]
    bad = cut_off(met, measured.unreachable, count)
    found = [Finding("node", f"{nodes.name(node)}: nothing comes through to {counted(len(failed[node]), 'other node')}",
                     nodes.hosts([node]), (node,)) for node in sorted(bad)]
    return found + [Finding("link", f"{nodes.name(pair[0])} and {nodes.name(pair[1])}: nothing comes through", (), pair,
                            (pair, pair[::-1])) for pair in sorted(measured.unreachable) if not bad & {*pair}]


def outliers_of(metric: Metric, links: Mapping[Link, Passes], nodes: Nodes, symmetric: bool) -> Odd:
    """Return the odd nodes, and the odd links between the others.

    A node is as its links show that are not to a node that is bad itself. Those are suspected by the better quarter of
    their links: so two bad nodes of four show, where of all links only those between the other two are good.
    """
    links = as_of_one_kind(links, nodes)
    roles = (SENDS,) if symmetric else (SENDS, RECEIVES)
    suspects = [odd(compare(metric, by_node(metric, links, role, 0.25))) for role in roles]
    bad: dict[int, dict[int, NodeScore]] = {}
    for role in roles if len(nodes.ranks) > 2 else ():
        used = usable(links, role, suspects[-1 - role])
        passes = by_node(metric, used, role, 0.5)
        number = Counter(link[role] for link in used)
        for node, score in compare(metric, passes, passes.keys() - suspects[role]).items():
            if score.odd and number[node] > 1:
                bad.setdefault(node, {})[role] = NodeScore(score, number[node])
    between = {link: passes for link, passes in links.items() if not bad.keys() & {*link}
               and (not symmetric or link[0] < link[1] or link[::-1] not in links)}
    least = 1 if len(nodes.ranks) == 2 else 2  # two links that are left among more tell nothing about each other
    scores = compare(metric, between)
    return Odd(bad, {link: score for link, score in scores.items() if score.odd and score.peers >= least})


def as_of_one_kind(links: Mapping[Link, Passes], nodes: Nodes) -> Mapping[Link, Passes]:
    """Return the links as if all nodes were of one kind: each pass times the median of all over that of its kinds."""
    groups: dict[object, list[Link]] = {}
    for link in links:
        groups.setdefault((nodes.kind[link[0]], nodes.kind[link[1]]), []).append(link)
    if len(groups) == 1:
        return links
    whole = medians(links, links)
    found: dict[Link, Passes] = {}
    for group in groups.values():
        levels = medians(links, group)
        for link in group:
            found[link] = [value * whole[at] / levels[at] if levels[at] else value
                           for at, value in enumerate(links[link])]
    return found


def medians(links: Mapping[Link, Passes], group: Collection[Link]) -> Passes:
    """Return the median of some links in each pass."""
    count = max(len(links[link]) for link in group)
    return [median([links[link][at] for link in group if at < len(links[link])]) for at in range(count)]


def usable(links: Mapping[Link, Passes], role: int, bad: Collection[int]) -> dict[Link, Passes]:
    """Return the links by which nodes are judged: those whose other end is not bad, where a node has such."""
    good = {link: passes for link, passes in links.items() if link[1 - role] not in bad}
    nodes = {link[role] for link in good}
    return {link: passes for link, passes in links.items() if link in good or link[role] not in nodes}


def by_node(metric: Metric, links: Mapping[Link, Passes], role: int, place: float) -> dict[int, Passes]:
    """Return for each node and pass the value that stands at `place` of its links: 0 is the best, 0.5 the median.

    It is the better of the middle where these are two.
    """
    of: dict[int, list[Passes]] = {}
    for link, passes in links.items():
        of.setdefault(link[role], []).append(passes)
    found = {}
    for node, some in of.items():
        columns = [sorted((one[at] for one in some if at < len(one)), reverse=metric.more)
                   for at in range(max(map(len, some)))]
        found[node] = [column[int((len(column) - 1) * place)] for column in columns]
    return found


def describe(name: str, found: Odd, links: Mapping[Link, Passes], nodes: Nodes) -> list[Finding]:
    """Return the findings of a metric: switches, most of whose nodes are odd, the other odd nodes, then links."""
    left = dict(found.nodes)
    switches = nodes.switches()
    accused = {switch: some for switch, some in switches.items() if len(left.keys() & {*some}) > max(1, len(some) // 2)}
    result = []
    for switch, some in accused.items():
        members = {node: left.pop(node) for node in some if node in left}
        hosts = nodes.hosts(members)
        called = fold_hosts(hosts) if len(hosts) == len(members) else counted(len(members), "node")
        result.append(of_nodes("switch", f"switch {switch}, {called}", name, members,
                               hosts if len(accused) < len(switches) else (), links))
    result += [of_nodes("node", nodes.name(node), name, {node: roles}, nodes.hosts([node]), links)
               for node, roles in left.items()]
    return result + [of_link(name, link, score, nodes) for link, score in found.links.items()]


def of_nodes(
    subject: str, called: str, name: str, members: Mapping[int, Mapping[int, NodeScore]], hosts: tuple[str, ...],
    links: Mapping[Link, Passes],
) -> Finding:
    """Return the finding of a node, or of those of a switch, with how they send and receive."""
    scores = [(role, one) for roles in members.values() for role, one in roles.items()]
    roles = {role for role, _ in scores}
    pairs = counted(sum(one.links for role, one in scores if role == scores[0][0]), "pair")
    value, level, by = (median([getattr(one.score, field) for _, one in scores])
                        for field in ("value", "level", "ratio"))
    if name == "latency":
        words = f"latency {in_words(value, 's')}, {in_words(level, 's')} between the others ({pairs})"
    elif name == "resent":
        verbs = " and ".join(verb for role, verb in ((SENDS, "sends"), (RECEIVES, "is sent")) if role in roles)
        words = f"{in_words(value, '')} of the TCP segments that it {verbs} are lost"
    else:
        verbs = " and ".join(VERBS[role] for role in sorted(roles))
        other = f", {VERBS[1 - min(roles)]} normally" if len(roles) == 1 else ""
        words = f"{verbs} at {share(by)} of the median ({pairs}){other}"
    of = tuple(link for link in links if any(link[role] in members for role in roles))
    return Finding(subject, f"{called}: {words}", hosts, tuple(members), of, name,
                   min(one.score.ratio for _, one in scores))


def of_link(name: str, link: Link, score: Score, nodes: Nodes) -> Finding:
    """Return the finding of a single link: its ends are as others are on their other links."""
    ends = [nodes.name(node) for node in link]
    both = (link, link[::-1]) if name in SYMMETRIC else (link,)
    if len(nodes.ranks) == 2:
        unit = LINK_METRICS[name].unit
        words = (f"{ends[0]} to {ends[1]}: {LINK_METRICS[name].words}: {in_words(score.value, unit)}, "
                 f"{in_words(score.level, unit)} the other way; of two nodes it cannot be told which is at fault")
    elif name == "latency":
        words = f"{ends[0]} and {ends[1]}: latency {in_words(score.value, 's')}, {in_words(score.level, 's')} elsewhere"
    elif name == "resent":
        words = f"{ends[0]} to {ends[1]}: {in_words(score.value, '')} of the TCP segments are lost"
    else:
        words = f"{ends[0]} to {ends[1]}: at {share(score.ratio)} of the median of {counted(score.peers, 'link')}"
    return Finding("link", words, (), link, both, name, score.ratio)
