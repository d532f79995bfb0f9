"""The plan: pure functions on facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.base import text as words
from mpiddp.base.config import LaunchConfig
from mpiddp.base.errors import PROBLEMS_FILE, LaunchError
from mpiddp.discovery.cpus import Topology
from mpiddp.discovery.devices import DeviceFacts
from mpiddp.discovery.gpus import Gpu
from mpiddp.discovery.host import HostFacts, Interface
from mpiddp.discovery.script import ScriptFacts
from mpiddp.options.parser import parse_output_filter
from mpiddp.planning import gpus, job, network, problems
from mpiddp.planning.environment import Endpoint
from tests.messages import find, message

TORCH = DeviceFacts(
    torch_version="2.13.0", kind="cuda", gpus=(Gpu("GPU-a", "GPU-a"),) * 4,
    default_backends={"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"},
    backends={"gloo": ("cpu", "cuda"), "nccl": ("cuda",)},
)
CPU_TORCH = DeviceFacts(torch_version="2.13.0+cpu", default_backends=TORCH.default_backends,
                        backends={"gloo": ("cpu", "cuda")})


EIGHT = Topology(tuple((cpu,) for cpu in range(8)), (0,) * 8)


def host(node: int = 0, name: str = "", *interfaces: Interface, script: ScriptFacts | None = None) -> HostFacts:
    return HostFacts(
        name or f"n{node}", node, frozenset(range(8)), frozenset(range(8)), EIGHT, False, None, interfaces, script,
        versions={"Python": "3.11.7"}, prefix="/env", shm_bytes=2**34, open_files=4096)


def nic(name: str, address: str, network: str, speed: int = 1000, loopback: bool = False) -> Interface:
    return Interface(name, address, network, loopback, speed)


LO = nic("lo", "127.0.0.1", "127.0.0.0/8", loopback=True)


@pytest.mark.parametrize(("nodes", "local_ranks", "local_sizes", "node_ranks"), [
    ([0, 0, 0, 0], [0, 1, 2, 3], [4, 4, 4, 4], [0, 0, 0, 0]),
    ([0, 0, 2, 2], [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 1, 1]),
    ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1], [2, 2, 1, 2, 2], [0, 1, 2, 0, 1]),  # cyclic and uneven
    ([0, 1, 0, 3], [0, 0, 1, 0], [2, 1, 2, 1], [0, 1, 0, 2]),  # arbitrary
    ([0], [0], [1], [0]),
])
def test_places(nodes: list[int], local_ranks: list[int], local_sizes: list[int], node_ranks: list[int]) -> None:
    found = job.locate_ranks(nodes)
    assert [one.rank for one in found] == list(range(len(nodes)))
    assert {one.world_size for one in found} == {len(nodes)}
    assert [one.local_rank for one in found] == local_ranks
    assert [one.local_world_size for one in found] == local_sizes
    assert [one.node_rank for one in found] == node_ranks
    assert {one.num_nodes for one in found} == {len(set(nodes))}


def meet(facts: list[HostFacts], *failed: tuple[int, str],
         asked: network.NetworkConstraint = network.ANY_NETWORK) -> tuple[str, list[str]]:
    """Return the address that is agreed on and each node's interface; `failed` are nodes and what they don't reach."""
    offered = network.rank_addresses(facts, asked)
    trials = {
        node: [network.ProbeResult(error="no answer") if (node, one.address) in failed else network.ProbeResult(
            next((each.name for each in facts[node].interfaces if each.network == one.network), "routed"))
            for one in offered]
        for node in range(1, len(facts))
    }
    address, interfaces = network.choose_address(offered, trials, dict(enumerate(one.hostname for one in facts)), asked,
                                                 [one.interfaces for one in facts])
    return address, [interfaces[node] for node in range(len(facts))]


def test_one_node_meets_on_loopback() -> None:
    offered = network.rank_addresses([host(), host()])
    assert network.choose_address(offered, {}, {0: "n0"}) == ("127.0.0.1", {0: "lo"})


def test_nodes_meet_on_the_fastest_common_subnet() -> None:
    facts = [
        host(0, "a", LO, nic("eth0", "10.0.0.1", "10.0.0.0/24"), nic("ib0", "10.1.0.1", "10.1.0.0/16", 200_000)),
        host(1, "b", LO, nic("ens1", "10.0.0.2", "10.0.0.0/24"), nic("ib1", "10.1.0.2", "10.1.0.0/16", 200_000)),
    ]
    assert meet(facts) == ("10.1.0.1", ["ib0", "ib1"])
    assert meet(facts, (1, "10.1.0.1")) == ("10.0.0.1", ["eth0", "ens1"])


def test_a_network_that_one_node_lacks_is_tried_last() -> None:
    facts = [
        host(0, "a", nic("ib0", "10.1.0.1", "10.1.0.0/16", 200_000), nic("eth0", "10.0.0.1", "10.0.0.0/24")),
        host(1, "b", nic("eth0", "10.0.0.2", "10.0.0.0/24")),
    ]
    assert meet(facts) == ("10.0.0.1", ["eth0", "eth0"])


def test_a_bridge_that_every_node_has_is_tried_last() -> None:
    fast = nic("virbr0", "10.8.0.1", "10.8.0.0/24", 100_000)
    docker = nic("docker0", "172.17.0.1", "172.17.0.0/16", 100_000)
    facts = [host(0, "a", docker, fast, nic("eth0", "10.0.0.1", "10.0.0.0/24")),
             host(1, "b", docker, nic("virbr0", "10.8.0.2", "10.8.0.0/24"), nic("eth0", "10.0.0.2", "10.0.0.0/24"))]
    assert [one.name for one in network.rank_addresses(facts)] == ["eth0", "virbr0", "docker0"]


def test_ipv4_goes_before_ipv6_and_ipv6_serves_alone() -> None:
    six = [nic("eth0", f"fd00::{i}", "fd00::/64") for i in (1, 2)]
    four = [nic("eth0", f"10.0.0.{i}", "10.0.0.0/24") for i in (1, 2)]
    assert meet([host(0, "a", six[0]), host(1, "b", six[1])]) == ("fd00::1", ["eth0", "eth0"])
    assert meet([host(0, "a", six[0], four[0]), host(1, "b", six[1], four[1])])[0] == "10.0.0.1"


@pytest.mark.parametrize(("interface", "address", "options"), [
    ("ib9", None, "--interface=ib9"), (None, "10.9.9.9", "--master-addr=10.9.9.9"),
    ("eth", None, ""), ("10.0.0.0/16", "10.0.0.1", ""), (None, None, ""), ("lo", None, ""), ("127.0.0.0/8", None, ""),
    (None, "127.0.0.1", ""), (None, "127.0.1.1", ""), (None, "::1", ""), (None, "localhost", ""), (None, "a", ""),
    ("lo", "10.0.0.1", "--interface=lo --master-addr=10.0.0.1")])
def test_a_network_that_the_only_node_lacks(interface: str | None, address: str | None, options: str) -> None:
    """The job runs all the same, over loopback; a name may be the node's own."""
    facts = [host(0, "a", LO, nic("eth0", "10.0.0.1", "10.0.0.0/24"))] * 2
    warnings = job.plan_pre_torch(facts, LaunchConfig(interface=interface, master_addr=address))[0].warnings
    words = message("launch/interface_unused", options=options, host="a", interfaces="lo 127.0.0.1, eth0 10.0.0.1")
    assert [line for line in warnings if line.startswith("no-interface")] == [words] * bool(options)
    unread = job.plan_pre_torch([host()], LaunchConfig(interface=interface, master_addr=address))[0].warnings
    assert not any(line.startswith("no-interface") for line in unread)


def test_options_that_ranks_have_to_have_alike() -> None:
    alike = [host(rank)._replace(options={"log_dir": "set"}) for rank in range(3)]
    problems.check_options(alike)
    with pytest.raises(LaunchError) as caught:
        problems.check_options([*alike, host(3)])
    assert caught.value.name == "options-differ"
    assert caught.value.actual == message(
        "launch/options_differ", option="log_dir", value="set", other="not set", rank="rank 3 on n3")
    with pytest.raises(LaunchError, match="options-differ") as caught:
        problems.check_options([host(0), host(1)._replace(options={"backend": "mpi"})])
    assert caught.value.actual == message(
        "launch/options_differ", option="backend", value="not set", other="mpi", rank="rank 1 on n1")
    profile = host(0)._replace(
        options={"log_dir": "set"}, site_file="/etc/site.toml", site_options={"log-dir": "/logs"})
    with pytest.raises(LaunchError, match="options-differ") as caught:
        problems.check_options([profile, host(1)])
    assert caught.value.actual == message(
        "launch/profiles_differ", option="log_dir", value="set", other="not set", rank="rank 1 on n1",
        file="/etc/site.toml", host="n0", other_file="none", other_host="n1")
    assert "MPIDDP_SITE=" in caught.value.do
    problems.check_options([profile, profile._replace(site_options={"stall": "5"})])
    assert LaunchConfig().job_wide_options() == {}
    assert LaunchConfig(log_dir="/a", port=29500, stall_s=9, init=False).job_wide_options() == {
        "init": "False", "log_dir": "set"}


@pytest.mark.parametrize("text", ["none", "fold", "0,12,local-1"])
def test_the_ranks_that_are_shown_are_the_same_on_all_ranks(text: str) -> None:
    assert LaunchConfig(output_filter=parse_output_filter(text)).job_wide_options() == {"show": text}


@pytest.mark.parametrize(("ours", "arguments", "ranks", "warned"), [
    ("", (), 2, True), ("--local_rank", (), 2, False), ("", (), 1, False), ("", ("--local_rank=0",), 2, False)])
def test_a_script_with_an_option_for_its_local_rank(
    ours: str, arguments: tuple[str, ...], ranks: int, warned: bool
) -> None:
    facts = [host(script=ScriptFacts("old.py", local_rank_options=("--local_rank",)))] * ranks
    found = problems.warn_local_rank_option(facts, ours, arguments)
    assert found == [message(
        "launch/local_rank_option", option="--local_rank", ours="--pass-local-rank=--local_rank")] * warned


@pytest.mark.parametrize(("options", "passed", "ours"), [
    (("--local_rank",), "--local-rank", "--pass-local-rank=--local_rank"),
    (("--local-rank",), "--local_rank", "--pass-local-rank"),
    (("--local_rank", "--local-rank"), "--local-rank", "")])
def test_a_local_rank_by_another_name_than_the_scripts(options: tuple[str, ...], passed: str, ours: str) -> None:
    facts = [host(script=ScriptFacts("old.py", local_rank_options=options, reads_local_rank=True))]
    warning = message("launch/local_rank_spelling", option=options[0], passed=passed, ours=ours)
    assert problems.warn_local_rank_option(facts, passed, ()) == ([warning] if ours else [])


def test_addresses_with_their_ports_are_as_urls_have_them() -> None:
    assert [words.format_address(one, 29500) for one in ("10.1.0.2", "n7.site", "fd00::1")] == [
        "10.1.0.2:29500", "n7.site:29500", "[fd00::1]:29500"]


def test_a_routed_network_serves_where_it_leads_there() -> None:
    facts = [host(0, "a", nic("eth0", "10.0.0.1", "10.0.0.1/32")), host(1, "b", nic("eth0", "10.0.1.1", "10.0.1.1/32"))]
    assert meet(facts) == ("10.0.0.1", ["eth0", "routed"])


def routed(node: int, rails: int = 8) -> HostFacts:
    """Return a node with rails of 400 Gbit/s and a bond of 100, each on a subnet that no other node is on."""
    return host(node, f"n{node}", LO, *(
        nic(f"ib{rail}", f"10.{rail}.{node}.1", f"10.{rail}.{node}.0/24", 400_000) for rail in range(rails)),
        nic("bond0", f"10.100.{node}.1", f"10.100.{node}.0/24", 100_000))


def test_rails_that_lead_to_their_like_alone_do_not_keep_the_bond_from_being_tried() -> None:
    facts = [routed(0), routed(1)]
    assert [one.name for one in network.rank_addresses(facts)] == ["ib0", "bond0",
                                                                   *(f"ib{rail}" for rail in range(1, 8))]
    assert meet(facts, *((1, f"10.{rail}.0.1") for rail in range(8)))[0] == "10.100.0.1"


def test_an_address_for_two_machines_on_a_cable_has_to_be_named() -> None:
    cable = [nic("eth0", f"169.254.0.{node}", "169.254.0.0/16", 10_000) for node in (1, 2)]
    facts = [host(node, f"n{node}", LO, one) for node, one in enumerate(cable)]
    assert meet(facts, asked=network.NetworkConstraint("eth0")) == ("169.254.0.1", ["eth0", "eth0"])
    with pytest.raises(LaunchError, match="no-network"):
        network.rank_addresses(facts)


HSN = [[nic(f"hsn{at}", f"10.0.{node}.{at}", "10.0.0.0/16", 200_000) for at in range(4)] for node in (1, 2)]
MANAGED = [nic("eth0", f"10.9.0.{node}", "10.9.0.0/24") for node in (1, 2)]
BRIDGE = nic("virbr0", "192.168.122.1", "192.168.122.0/24")


@pytest.mark.parametrize(("one", "other", "chosen", "expected"), [
    ([LO, *HSN[0]], HSN[1], "hsn0", ["", ""]),  # NCCL takes all four
    ([LO, *HSN[0], BRIDGE], HSN[1], "hsn0", ["=hsn0,hsn1,hsn2,hsn3"] * 2),  # one rule for all nodes
    ([*HSN[0], MANAGED[0]], [*HSN[1], MANAGED[1]], "hsn1", ["=hsn1,hsn0,hsn2,hsn3"] * 2),  # not the slow one besides
    ([LO, MANAGED[0]], [LO, MANAGED[1]], "eth0", ["", ""]),
    ([LO, MANAGED[0], nic("docker0", "172.17.0.1", "172.17.0.0/16")], [MANAGED[1]], "eth0", ["", ""]),
    ([nic("ib0", "10.1.0.1", "10.1.0.0/16", 200_000), MANAGED[0]], [MANAGED[1]], "eth0", ["=eth0"] * 2),
    ([nic("lo", "10.3.0.1", "10.3.0.1/32")], [nic("lo", "10.3.0.2", "10.3.0.2/32")], "lo", ["", ""]),
    ([], [], "routed", ["", ""]),
])
def test_nccl_is_told_its_interfaces_where_its_own_choice_would_be_wrong(
    one: list[Interface], other: list[Interface], chosen: str, expected: list[str]
) -> None:
    assert network.choose_nccl_interfaces([network.NodeInterfaces(own, chosen, [chosen, "eth0"])
                                           for own in (one, other)]) == expected


def test_nccl_would_take_interfaces_without_an_address() -> None:
    """As the ends of containers' networks, or rails of RoCE: with a link-local address of IPv6, which leads nowhere."""
    ways = [network.NodeInterfaces([one], "eth0", unaddressed=["veth1a2b"]) for one in MANAGED]
    assert network.choose_nccl_interfaces(ways) == ["=eth0", "=eth0"]
    assert network.choose_nccl_interfaces([way._replace(unaddressed=["docker0"]) for way in ways]) == ["", ""]


@pytest.mark.parametrize(("asked", "expected"), [
    ("hsn", "=hsn0,hsn1,hsn2,hsn3"), ("hsn0,hsn2", "=hsn0,hsn2"), ("10.0.0.0/16", "=hsn0,hsn1,hsn2,hsn3"),
    ("hsn0", "=hsn0")])
def test_nccl_is_told_all_that_the_user_has_named(asked: str, expected: str) -> None:
    ways = [network.NodeInterfaces([*own, other], "hsn0") for own, other in zip(HSN, MANAGED, strict=True)]
    assert network.choose_nccl_interfaces(ways, asked) == [expected] * 2


def test_no_network_is_a_problem() -> None:
    with pytest.raises(LaunchError) as caught:
        network.rank_addresses([host(0, "a", LO), host(1, "b", LO)])
    assert (caught.value.name, caught.value.actual) == ("no-network", message("launch/loopback_alone", host="a"))


TWO_NETWORKS = [
    host(0, "n0", LO, nic("eth0", "10.0.0.1", "10.0.0.0/24"), nic("ib0", "10.1.0.1", "10.1.0.0/16", 200_000)),
    host(1, "n1", LO, nic("eth0", "10.0.0.2", "10.0.0.0/24"), nic("ib0", "10.1.0.2", "10.1.0.0/16", 200_000)),
]


@pytest.mark.parametrize("asked", [network.NetworkConstraint("eth0"), network.NetworkConstraint(address="10.0.0.1"),
                                   network.NetworkConstraint("eth0", "10.0.0.1")])
def test_the_network_that_the_user_names(asked: network.NetworkConstraint) -> None:
    assert meet(TWO_NETWORKS, asked=asked) == ("10.0.0.1", ["eth0", "eth0"])


@pytest.mark.parametrize(("asked", "names"), [
    ("ib", ["ib0"]), ("eth0,ib0", ["ib0", "eth0"]), ("10.0.0.0/16", ["eth0"]), ("10.1.0.7/16,eth", ["ib0", "eth0"]),
    ("ib7,eth", ["eth0"])])
def test_networks_that_the_user_describes(asked: str, names: list[str]) -> None:
    """They are tried in the usual order; each node goes by the interface that leads there."""
    assert [one.name for one in network.rank_addresses(TWO_NETWORKS, network.NetworkConstraint(asked))] == names
    assert meet(TWO_NETWORKS, asked=network.NetworkConstraint(asked))[1] == [names[0]] * 2


def test_a_node_that_lacks_the_very_name_goes_by_the_interface_that_leads_there() -> None:
    facts = [host(node, f"n{node}", nic(name, f"10.0.0.{node}", "10.0.0.0/24"))
             for node, name in enumerate(("eth0", "eth0.100"))]
    assert meet(facts, asked=network.NetworkConstraint("eth0")) == ("10.0.0.0", ["eth0", "eth0.100"])


def test_an_address_of_ipv6_has_several_forms() -> None:
    facts = [host(node, f"n{node}", nic("eth0", f"fd00::{node + 1}", "fd00::/64")) for node in (0, 1)]
    assert meet(facts, asked=network.NetworkConstraint(address="FD00:0::1"))[0] == "fd00::1"


def test_a_name_is_no_beginning_of_another() -> None:
    found = network.match_interfaces("eth1",
                                     [nic("eth10", "10.0.0.1", "10.0.0.0/24"), nic("eth1", "10.1.0.1", "10.1.0.0/24")])
    assert [one.name for one in found] == ["eth1"]


@pytest.mark.parametrize(("asked", "options"), [
    (network.NetworkConstraint("10.7.0.0/16"), "--interface=10.7.0.0/16"),
    (network.NetworkConstraint("ib7"), "--interface=ib7"),
    (network.NetworkConstraint(address="10.0.0.2"), "--master-addr=10.0.0.2"),
    (network.NetworkConstraint("ib0", "10.0.0.1"), "--interface=ib0 --master-addr=10.0.0.1"),
    (network.NetworkConstraint("lo"), "--interface=lo"), (network.NetworkConstraint("ib0"), "--interface=ib0"),
])
def test_a_network_that_is_not_there(asked: network.NetworkConstraint, options: str) -> None:
    third = host(2, "n2", LO, nic("eth0", "10.0.0.3", "10.0.0.0/24"))
    with pytest.raises(LaunchError) as caught:
        network.rank_addresses([*TWO_NETWORKS, third], asked)
    assert caught.value.name == "no-network"
    assert caught.value.actual == (
        message("launch/interface_missing", options=options, hosts="n2") if options == "--interface=ib0" else message(
            "launch/network_missing", options=options, host="n0", interfaces="eth0 10.0.0.1, ib0 10.1.0.1"))


def test_addresses_that_only_some_nodes_reach_are_named_with_them() -> None:
    third = host(2, "n2", LO, nic("eth0", "10.0.0.3", "10.0.0.0/24"), nic("ib0", "10.1.0.3", "10.1.0.0/16", 200_000))
    with pytest.raises(LaunchError) as caught:
        meet([*TWO_NETWORKS, third], (1, "10.1.0.1"), (2, "10.0.0.1"))
    assert caught.value.name == "address-unreachable"
    assert caught.value.actual.splitlines() == [message("launch/address_unreachable", host="n0"), *(
        message("launch/unreachable_from", address=address, interface=name, hosts=node, error="no answer")
        for address, name, node in (("10.1.0.1", "ib0", "n1"), ("10.0.0.1", "eth0", "n2")))]


def test_a_rank_that_reached_nothing_is_named_by_its_host() -> None:
    endpoint = Endpoint("10.0.0.1", 4000, "token", "run")
    assert network.check_store_reached([None, None], ["a", "b"], endpoint) == [None, None]
    with pytest.raises(LaunchError) as caught:
        network.check_store_reached([None, "timed out"], ["a", "b"], endpoint)
    assert caught.value.name == "address-unreachable"
    assert caught.value.actual == message(
        "launch/store_unreachable", hosts="b", host="a", address="10.0.0.1", port=4000, error="timed out")


def test_ranks_must_see_the_same_kind_of_device() -> None:
    gpus.check_device_kinds(None, [TORCH, TORCH], ["a", "b"])
    with pytest.raises(LaunchError) as caught:
        gpus.check_device_kinds(None, [TORCH, TORCH, CPU_TORCH], ["n1", "n2", "n3"])
    assert (caught.value.name, caught.value.actual) == ("mixed-devices", message(
        "launch/mixed_devices", common="4 cuda devices", host="n3", other="no GPU"))


def test_a_device_that_was_asked_for_must_be_there() -> None:
    gpus.check_device_kinds("cuda", [TORCH], ["n1"])
    gpus.check_device_kinds("cpu", [CPU_TORCH], ["n1"])
    with pytest.raises(LaunchError) as caught:
        gpus.check_device_kinds("cuda", [TORCH, CPU_TORCH], ["n1", "n2"])
    assert (caught.value.name, caught.value.actual) == ("device-unavailable", message(
        "launch/device_unavailable", device="cuda", hosts="n2", version="2.13.0+cpu", devices="no GPU"))


@pytest.mark.parametrize(("asked", "facts", "backend"), [
    (None, TORCH, "nccl"), (None, CPU_TORCH, "gloo"), ("gloo", TORCH, "gloo"), ("NCCL", TORCH, "nccl"),
    ("cpu:gloo,cuda:nccl", TORCH, "cpu:gloo,cuda:nccl"),
    (None, DeviceFacts(kind="xpu", gpus=(Gpu("", ""),), default_backends=TORCH.default_backends), "xccl"),
])
def test_backend(asked: str | None, facts: DeviceFacts, backend: str) -> None:
    assert gpus.choose_backend(asked, [facts], ["a"]) == backend


def test_ranks_that_share_a_gpu_have_gloo() -> None:
    assert gpus.choose_backend(None, [TORCH], ["a"], shared=True) == "gloo"
    with pytest.raises(LaunchError, match="backend-unavailable") as caught:
        gpus.choose_backend("cpu:gloo,cuda:nccl", [TORCH], ["a"], shared=True)
    assert caught.value.actual == message("launch/shared_gpu_with_nccl", backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(("asked", "facts", "devices"), [
    ("nccl", CPU_TORCH, "no GPU"), ("nonsense", TORCH, "4 cuda devices"), ("cpu:gloo,cuda:nccl", CPU_TORCH, "no GPU"),
    ("nccl", DeviceFacts(torch_version="2.13.0", backends=TORCH.backends), "no GPU"),
])
def test_backend_unavailable(asked: str, facts: DeviceFacts, devices: str) -> None:
    with pytest.raises(LaunchError) as caught:
        gpus.choose_backend(asked, [TORCH, facts], ["a", "b"])
    assert caught.value.name == "backend-unavailable"
    assert caught.value.actual == message(
        "launch/backend_unavailable", backend=asked, rank=int(asked != "nonsense"), host="a" if asked == "nonsense"
        else "b", devices=devices, version=facts.torch_version, backends=", ".join(sorted(facts.backends)))


def test_a_torch_that_cannot_be_imported_is_named_by_its_host() -> None:
    with pytest.raises(LaunchError) as caught:
        gpus.check_torch([TORCH, DeviceFacts(error="ImportError: libcudart.so.12")], ["a", "b"])
    assert caught.value.name == "torch-unusable"
    assert caught.value.actual == message(
        "launch/torch_not_importable", error="ImportError: libcudart.so.12", hosts="b")


def test_a_script_that_some_hosts_cannot_see_is_named_by_them() -> None:
    there, gone = ScriptFacts("t.py"), ScriptFacts("t.py", missing=True, error="/x/t.py: No such file or directory")
    problems.check_script([host(script=there)])
    with pytest.raises(LaunchError) as caught:
        problems.check_script([host(script=there), *(host(i, script=gone) for i in range(1, 9))])
    assert caught.value.name == "script-missing"
    assert caught.value.actual == message("launch/script_missing", path="/x/t.py", hosts="on n[1-8]")


def test_a_script_that_differs_names_the_minority() -> None:
    facts = [host(i, script=ScriptFacts("t.py", digest="beef" if i == 2 else "cafe")) for i in range(5)]
    with pytest.raises(LaunchError) as caught:
        problems.check_script(facts)
    differs = message("launch/script_differs", script="t.py", common="cafe", others="beef on n2")
    assert (caught.value.name, caught.value.actual) == ("script-differs", differs)
    other = [host(i, script=ScriptFacts("server.py", digest="f00d")) for i in (5, 6)]
    with pytest.raises(LaunchError) as caught:
        problems.check_script([*other, *facts])
    assert caught.value.actual == differs
    problems.check_script([*other, *facts[:2]])  # each rank its own program


def test_other_software_names_the_minority() -> None:
    facts = [host(i)._replace(versions={"Python": "3.12.1" if i in (3, 4) else "3.11.7"}) for i in range(7)]
    with pytest.raises(LaunchError) as caught:
        problems.check_software(facts)
    assert (caught.value.name, caught.value.actual) == ("version-skew", message(
        "launch/version_skew", software="Python", common="3.11.7", others="3.12.1 on n[3-4]"))
    with pytest.raises(LaunchError) as caught:
        gpus.check_torch([TORCH, TORCH, TORCH._replace(nccl_version="2.20")], ["a", "b", "c"])
    assert (caught.value.name, caught.value.actual) == ("version-skew", message(
        "launch/version_skew", software="NCCL", common="missing", others="2.20 on c"))


MPIRUN_WITH, MPICH_WITH = "mpirun --hostfile {} -x PATH", "mpiexec -f {}"
MAKE_HOSTS = ", after awk '{while ($2--) print $1}' $PE_HOSTFILE > $TMPDIR/hosts"


@pytest.mark.parametrize(("launcher", "scheduler", "start"), [
    ("Open MPI's mpirun", "PBS", MPIRUN_WITH.format("$PBS_NODEFILE")),
    ("Open MPI's mpirun", "SGE", MPIRUN_WITH.format("$TMPDIR/hosts") + MAKE_HOSTS),
    ("Open MPI's mpirun", "LSF", MPIRUN_WITH.format("$LSB_DJOB_HOSTFILE")), ("Open MPI's mpirun", "Slurm", "srun"),
    ("MPICH's or Intel MPI's mpiexec", "PBS", MPICH_WITH.format("$PBS_NODEFILE")),
    ("MPICH's or Intel MPI's mpiexec", "SGE", MPICH_WITH.format("$TMPDIR/hosts") + MAKE_HOSTS),
])
def test_all_ranks_on_one_of_several_nodes(launcher: str, scheduler: str, start: str) -> None:
    first = host()._replace(launcher=launcher, scheduler=scheduler, job_nodes=3)
    words = {"scheduler": scheduler, "nodes": 3, "host": "n0", "start": start}
    assert problems.warn_idle_nodes([first, host()]) == [
        message("launch/idle_nodes", ranks="all 2 ranks run", **words)]
    assert problems.warn_idle_nodes([first]) == [message("launch/idle_nodes", ranks="the only rank runs", **words)]
    assert problems.warn_idle_nodes([first, host(1)]) == []
    assert problems.warn_idle_nodes([first._replace(job_nodes=1), host()]) == []
    assert problems.warn_idle_nodes([first._replace(launcher="srun"), host()]) == []


def test_warnings_are_a_line_each() -> None:
    assert problems.warn_hosts([host(0), host(1)]) == []
    poor = [host(i)._replace(shm_bytes=2**24, open_files=256) for i in (2, 3)]
    found = problems.warn_hosts([host(0), *poor, host(4, "n0")])
    assert find("launch/shm_small", found[0], mib=16, hosts="n[2-3]")
    assert found[1:] == [message("launch/low_nofile", limit=256, hosts="n[2-3]"),
                         message("launch/same_hostname", nodes=2, host="n0")]
    assert problems.warn_hosts([host(0), host(1), host(2)._replace(prefix="/other")]) == [
        message("launch/python_differs", common="/env", others="/other on n2")]


def test_stale_variables_are_shown_with_their_old_values() -> None:
    new = [{"RANK": "0", "MASTER_ADDR": "a"}, {"RANK": "1", "MASTER_ADDR": "a"}]
    assert problems.warn_stale_variables([(1, {"RANK": "1"}, new[1])]) == []
    old = [{"MASTER_ADDR": "b"}, {"MASTER_ADDR": "b", "RANK": "7"}]
    assert problems.warn_stale_variables([(0, old[0], new[0]), (1, old[1], new[1])]) == [
        message("launch/stale_environment", variables="MASTER_ADDR=b on rank 0, RANK=7 on rank 1")]


def test_hosts_are_folded_and_ranks_counted() -> None:
    assert words.fold_hosts(f"n{i:03}" for i in range(1, 65)) == "n[001-064]"
    assert words.fold_hosts(["gpu-b2", "gpu-a10", "gpu-a11", "gpu-a11"]) == "gpu-a[10-11],gpu-b2"
    assert words.join_names([str(i) for i in range(1024)]) == "0, 1, 2, 3, 4 and 1,019 more"
    assert words.fold_hosts(f"host{i**3}" for i in range(100)).endswith(" more")


def test_a_problem_reads_as_found_needed_do() -> None:
    """Its last line leads to the list of names, which is installed beside the code."""
    assert Path(PROBLEMS_FILE).is_file()
    assert str(LaunchError("a-name", "one\ntwo", "three", "four")).splitlines() == [
        "mpiddp: cannot start: a-name",
        "  found    one",
        "           two",
        "  needed   three",
        "  do       four",
        f"  more     {PROBLEMS_FILE}, a-name",
    ]


@pytest.mark.parametrize(("target", "advice"), [
    *((name, message("launch/omit_python")) for name in ("python", "python3.11")), ("train.py", "check the name"),
    ("where", message("launch/command_with_a_dot", command="where"))])
def test_what_to_do_about_a_missing_script(target: str, advice: str) -> None:
    with pytest.raises(LaunchError, match="script-missing") as caught:
        problems.check_script([host(script=ScriptFacts(target, missing=True, error=f"/home/me/{target}: gone"))])
    assert advice in caught.value.do
