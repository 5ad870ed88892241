"""What a plan will cost: memory and bytes, counted by hand."""

from __future__ import annotations

import itertools
import json

import pytest

from suite.core.layer_lists import gpt, resnet50
from suite.core.placement import LayerShape, plan_placement
from suite.core.simulate import main, read_layers
from suite.core.traffic import footprint

LAYERS = [LayerShape((3, 2)), LayerShape((4, 5)), LayerShape((7, 2), (True, False), 2)]
A, G = [9, 16, 14], [4, 25, 8]  # numbers in the factors
GRADIENTS = [6, 20, 28]


def test_alone_nothing_travels():
    cost = footprint(LAYERS, plan_placement(LAYERS, 1, 1), eigen=False, itemsize=8)
    assert cost.factors == cost.inverses == 8 * sum(A + G)
    assert cost.update.total == cost.refresh.total == cost.step.total == 0


@pytest.mark.parametrize("symmetric", [False, True])
def test_with_one_worker_a_layer_only_directions_travel(symmetric):
    plan = plan_placement(LAYERS, 3, 1)
    cost = footprint(LAYERS, plan, eigen=False, itemsize=1, symmetric=symmetric)
    assert sorted({plan.owner_of[i, "A"] for i in range(3)}) == [0, 1, 2]
    assert cost.factors == max(a + g for a, g in zip(A, G, strict=True))
    assert cost.refresh.total == 0
    assert cost.step.total == 2 * sum(GRADIENTS)
    assert cost.step.received == sum(GRADIENTS) - min(GRADIENTS)
    packed = [6 + 3, 10 + 15, 14 + 6] if symmetric else [a + g for a, g in zip(A, G, strict=True)]
    assert cost.update.total == 2 * sum(packed)
    assert cost.update.sent == sum(packed) - min(packed)


def test_with_all_workers_only_inverses_travel():
    plan = plan_placement(LAYERS, 3, 3)
    cost = footprint(LAYERS, plan, eigen=True, itemsize=1)
    values, vectors = [3, 2, 4, 5, 14, 4], [9, 4, 16, 25, 0, 8]
    assert cost.inverses == sum(values) + sum(vectors)
    assert cost.step.total == 0
    assert cost.refresh.total == 2 * cost.inverses


def test_what_is_large_is_broadcast():
    plan = plan_placement(LAYERS, 3, 3)
    cost = footprint(LAYERS, plan, eigen=False, itemsize=1, bucket_bytes=40)
    assert cost.refresh.total == 25 + 2 * (9 + 4 + 16 + 14 + 8)  # 25 numbers for two would be 50 bytes


def test_fewer_workers_need_less_memory_and_send_more_directions():
    for layers in (resnet50(), gpt()):
        costs = [footprint(layers, plan_placement(layers, 16, g)) for g in (1, 2, 4, 8, 16)]
        assert all(a.inverses <= b.inverses for a, b in itertools.pairwise(costs))
        assert all(a.step.received > b.step.received for a, b in itertools.pairwise(costs))
        assert costs[0].inverses < costs[-1].inverses
        assert costs[0].refresh.total == costs[-1].step.total == 0


def test_the_lists_have_the_models_parameters():
    """25,557,032 of torchvision's resnet50 without its 53,120 of BatchNorm; GPT-2's 124,439,808 without
    its 38,400 of LayerNorm."""
    count = sum(layer.blocks * layer.sizes[0] * layer.sizes[1] for layer in resnet50())
    assert count == 25_557_032 - 53_120
    assert sum(layer.sizes[0] * layer.sizes[1] for layer in gpt()) == 124_439_808 - 38_400


def test_the_command_prints_a_row_for_each_strategy(capsys, tmp_path):
    file = tmp_path / "layers.json"
    file.write_text(json.dumps([[3, 2], {"sizes": [7, 2], "diagonal": [True, False], "blocks": 2}]))
    assert read_layers(str(file)) == [LAYERS[0], LAYERS[2]]
    main([str(file), "--worlds", "1", "4", "--symmetry-aware", "--inverse", "--apart"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [["1", "1"], ["4", "1"], ["4", "2"], ["4", "4"]]
    main(["resnet50", "--worlds", "1024"])
    assert "1024" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"must be a list that is not empty, got \[\]"),
        ('{"sizes": [3, 2]}', "must be a list that is not empty, got {'sizes'"),
        ("3, 2", "must be resnet50, gpt, or a JSON file of layers: "),
        ("[[3]]", r"sizes of a layer must be a pair of int, got \[3\]"),
        ("[[3, 2, 1]]", r"sizes of a layer must be a pair of int, got \[3, 2, 1\]"),
        ("[[3.5, 2]]", r"sizes of a layer must be a pair of int, got \[3.5, 2\]"),
        ("[[3, -2]]", "sizes and blocks of a layer must be >= 1, got -2"),
        ('[{"sizes": [3, 2], "blocks": 0}]', "sizes and blocks of a layer must be >= 1, got 0"),
        ('[{"sizes": [3, 2], "diagonal": [true]}]', r"diagonal .* must be a pair of bool, got \[True\]"),
        ('[{"size": [3, 2]}]', "a layer must be .* got {'size'"),
        ('[{"sizes": [3, 2], "diagonals": [true, true]}]', "a layer must be .* got {'sizes'"),
        ("[3]", "a layer must be .* got 3"),
    ],
)
def test_a_file_that_is_no_list_of_layers_is_an_error(content, message, tmp_path, capsys):
    file = tmp_path / "layers.json"
    file.write_text(content)
    with pytest.raises((TypeError, ValueError), match=message):
        read_layers(str(file))
    with pytest.raises(SystemExit):
        main([str(file)])
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("resnet50 --worlds 4 0", "argument --worlds: must be >= 1, got 0"),
        ("gpt --layers -1", "argument --layers: must be >= 1, got -1"),
        ("gpt --width 0", "argument --width: must be >= 1, got 0"),
        ("nowhere.json", "model must be resnet50, gpt, or a JSON file of layers: "),
    ],
)
def test_wrong_arguments_of_the_command_say_what_is_right(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err
