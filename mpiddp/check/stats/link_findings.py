"""Findings about links between nodes: a switch, a node that sends or receives badly, a single link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum

from ...base.text import fold_hosts
from .outliers import Score, best, by_pass, median, median_passes, score_all, typical
from .schema import (
    BANDWIDTH,
    LATENCY,
    LINK_METRICS,
    RETRANSMITS,
    CheckFinding,
    Link,
    Measurements,
    Metric,
    Nodes,
    Passes,
    Subject,
    group_pairs,
)
from .text import count_text, format_ratio
from .tournament import cut_off_members, main_component, partners_of

SUSPECT_QUANTILE, NODE_QUANTILE = 0.25, 0.5  # of a node's links, best first: see find_link_outliers()


class Role(IntEnum):
    """A node's role in a link: its index in the pair."""

    SENDS = 0
    RECEIVES = 1


NodeScores = dict[int, dict[Role, tuple[Score, int]]]  # by node and role; the number is that of the links judged


def find_link_findings(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the findings about links between nodes.

    Links of a node with a finding of its own are omitted: excluding the node removes them.
    """
    findings = find_unreachable_nodes(measured, nodes)
    for name, values in measured.links.items():
        if links := {link: passes for link, passes in values.items() if passes}:
            findings += _describe_outliers(name, *find_link_outliers(name, links, nodes), links, nodes)
    blamed = {node for finding in findings if finding.subject != Subject.LINK for node in finding.nodes}
    return [finding for finding in findings if finding.subject != Subject.LINK or not blamed & {*finding.nodes}]


def find_unreachable_nodes(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the findings about unreachable pairs: nodes that are cut off, else links."""
    met = {(min(link), max(link)) for links in measured.links.values() for link, passes in links.items() if passes}
    failed = partners_of(measured.unreachable)
    count = len(failed.keys() | partners_of(met))
    several = {node for node, partners in failed.items() if len(partners) > 1}
    if several and not main_component(met, count):
        text = f"{count_text(len(several), 'node')} cannot reach each other"
        return [CheckFinding(Subject.NODE, text, (), tuple(sorted(several)))]
    cut_off = cut_off_members(met, measured.unreachable, count)
    findings = []
    for node in sorted(cut_off):
        text = f"{nodes.name(node)}: cannot reach {count_text(len(failed[node]), 'other node')}"
        findings.append(CheckFinding(Subject.NODE, text, nodes.hosts_to_exclude([node]), (node,)))
    for pair in sorted(pair for pair in measured.unreachable if not cut_off & {*pair}):
        text = f"{nodes.name(pair[0])} and {nodes.name(pair[1])} cannot reach each other"
        findings.append(CheckFinding(Subject.LINK, text, (), pair, (pair, pair[::-1])))
    return findings


def find_link_outliers(name: str, links: Mapping[Link, Passes], nodes: Nodes) -> tuple[NodeScores, dict[Link, Score]]:
    """Return the nodes that are outliers in a metric, and the outliers among the links of the other nodes.

    A node is judged by the median of its links to nodes that are not suspected. It is suspected by the best quarter of
    its links: if two of four nodes are bad, only the link between the other two is good, and the median misses it.
    """
    metric, is_symmetric = LINK_METRICS[name], name == LATENCY
    links = _scale_to_one_kind(links, nodes)
    roles = (Role.SENDS,) if is_symmetric else tuple(Role)
    suspects = {role: {node for node, score in score_all(metric, by_node(metric, links, role, SUSPECT_QUANTILE)).items()
                       if score.is_outlier} for role in roles}
    bad: NodeScores = {}
    for role in roles if len(nodes.ranks) > 2 else ():
        bad_partners = suspects[roles[-1 - role]]
        good = {link for link in links if link[1 - role] not in bad_partners}
        with_good = {link[role] for link in good}
        judged_by = {link: passes for link, passes in links.items() if link in good or link[role] not in with_good}
        passes = by_node(metric, judged_by, role, NODE_QUANTILE)
        counts = Counter(link[role] for link in judged_by)
        for node, score in score_all(metric, passes, passes.keys() - suspects[role]).items():
            if score.is_outlier and counts[node] > 1:
                bad.setdefault(node, {})[role] = score, counts[node]
    others = {link: passes for link, passes in links.items() if not bad.keys() & {*link}
              and (not is_symmetric or link[0] < link[1] or link[::-1] not in links)}
    min_peers = 1 if len(nodes.ranks) == 2 else 2  # of the last two links of several nodes, either may be the bad one
    scores = score_all(metric, others)
    return bad, {link: score for link, score in scores.items() if score.is_outlier and score.peers >= min_peers}


def _scale_to_one_kind(links: Mapping[Link, Passes], nodes: Nodes) -> Mapping[Link, Passes]:
    """Return the links scaled so that each pair of kinds of nodes has the same median."""
    groups = group_pairs(((nodes.kinds[link[0]], nodes.kinds[link[1]]), link) for link in links)
    if len(groups) == 1:
        return links
    of_all = median_passes(links.values())
    scaled: dict[Link, Passes] = {}
    for members in groups.values():
        of_group = median_passes([links[link] for link in members])
        for link in members:
            scaled[link] = [value * of_all[number] / of_group[number] if of_group[number] else value
                            for number, value in enumerate(links[link])]
    return scaled


def by_node(metric: Metric, links: Mapping[Link, Passes], role: Role, quantile: float) -> dict[int, Passes]:
    """Return a quantile of each node's links in a role, in each pass: 0 is the best, 0.5 the (better) median."""
    passes_of = group_pairs((link[role], passes) for link, passes in links.items())
    return {node: [sorted(values, reverse=metric.higher_is_better)[int((len(values) - 1) * quantile)]
                   for values in by_pass(of_links)] for node, of_links in passes_of.items()}


def _describe_outliers(
    name: str, bad: NodeScores, bad_links: Mapping[Link, Score], links: Mapping[Link, Passes], nodes: Nodes
) -> list[CheckFinding]:
    """Return the findings of a metric: switches with a majority of outliers, then other nodes, then links."""
    remaining = dict(bad)
    switches = nodes.by_switch()
    blamed = {switch: members for switch, members in switches.items()
              if len(remaining.keys() & {*members}) > max(1, len(members) // 2)}
    findings = []
    for switch, members in blamed.items():
        scores = {node: remaining.pop(node) for node in members if node in remaining}
        hosts = nodes.hosts_to_exclude(scores)
        label = fold_hosts(hosts) if len(hosts) == len(scores) else count_text(len(scores), "node")
        findings.append(_node_finding(Subject.SWITCH, f"switch {switch}, {label}", name, scores,
                                      hosts if len(blamed) < len(switches) else (), links))
    for node, roles in remaining.items():
        findings.append(_node_finding(Subject.NODE, nodes.name(node), name, {node: roles},
                                      nodes.hosts_to_exclude([node]), links))
    return findings + [_link_finding(name, link, score, nodes) for link, score in bad_links.items()]


def _node_finding(
    subject: Subject, label: str, name: str, members: NodeScores, hosts: tuple[str, ...],
    links: Mapping[Link, Passes],
) -> CheckFinding:
    """Return the finding about a node, or about the nodes of a switch, with their roles."""
    scores = [(role, score, count) for by_role in members.values() for role, (score, count) in by_role.items()]
    roles = sorted({role for role, _, _ in scores})
    pairs = count_text(sum(count for role, _, count in scores if role == scores[0][0]), "pair")
    value, peer_median, ratio = typical([score for _, score, _ in scores])
    metric = LINK_METRICS[name]
    if name == LATENCY:
        text = f"latency {metric.format(value)}, {metric.format(peer_median)} between the others ({pairs})"
    elif name == RETRANSMITS:
        direction = " and ".join({Role.SENDS: "from", Role.RECEIVES: "to"}[role] for role in roles)
        text = f"{metric.format(value)} of the TCP segments {direction} it were lost"
    else:
        verbs = " and ".join(role.name.lower() for role in roles)
        other = f", {Role(1 - roles[0]).name.lower()} normally" if len(roles) == 1 else ""
        text = f"{verbs} at {format_ratio(ratio)} of the median ({pairs}){other}"
    affected = tuple(link for link in links if any(link[role] in members for role in roles))
    return CheckFinding(subject, f"{label}: {text}", hosts, tuple(members), affected, name,
                   min(score.ratio for _, score, _ in scores))


def _link_finding(name: str, link: Link, score: Score, nodes: Nodes) -> CheckFinding:
    first, second = (nodes.name(node) for node in link)
    metric = LINK_METRICS[name]
    value, peer_median = metric.format(score.value), metric.format(score.peer_median)
    if len(nodes.ranks) == 2:
        text = (f"{first} to {second}: {metric.label} {value}, {peer_median} in the other direction; "
                "with two nodes, either may be at fault")
    elif name == LATENCY:
        text = f"{first} and {second}: latency {value}, {peer_median} elsewhere"
    elif name == RETRANSMITS:
        text = f"{first} to {second}: {value} of the TCP segments were lost"
    else:
        text = f"{first} to {second}: at {format_ratio(score.ratio)} of the median of {count_text(score.peers, 'link')}"
    affected = (link, link[::-1]) if name == LATENCY else (link,)
    return CheckFinding(Subject.LINK, text, (), link, affected, name, score.ratio)


def expected_bandwidth(measured: Measurements) -> float | None:
    """Return the bus bandwidth in B/s to expect of a large all-reduce, None without links.

    A ring is as fast as its slowest link. A job does not choose its links, so this is the minimum of each node's
    medians: of the links on which it sends, of those on which it receives, and of those between its ranks.
    """
    metric = LINK_METRICS[BANDWIDTH]
    links = {link: [best(metric, passes)] for link, passes in measured.links.get(BANDWIDTH, {}).items() if passes}
    medians = [passes[0] for role in Role for passes in by_node(metric, links, role, NODE_QUANTILE).values()]
    inside = group_pairs((measured.ranks[link[0]].node, best(metric, passes))
                         for link, passes in measured.inside_links.get(BANDWIDTH, {}).items() if passes)
    return min([*medians, *map(median, inside.values())], default=None)
