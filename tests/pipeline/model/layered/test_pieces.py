"""Values that travel between the pieces of a forward; test_traced_layers.py splits whole models."""

from stageline.pipeline.model.layered.pieces import travelling


def test_what_a_later_piece_needs_passes_through_those_between():
    """x -> [0] -> a, m -> [1] -> b -> [2] -> c -> [3] -> y; 3 needs m, too."""
    pieces = [(["x"], ["a", "m"]), (["a"], ["b"]), (["b"], ["c"]), (["m", "c"], ["y"])]
    assert travelling(pieces, ["x"], ["y"]) == [("x",), ("a", "m"), ("m", "b"), ("m", "c"), ("y",)]


def test_what_is_given_or_computed_early_may_be_an_end_and_a_piece_may_compute_nothing():
    pieces = [(["x", "weight"], ["a"]), ([], []), (["x"], [])]
    assert travelling(pieces, ["x", "z"], ["a", "x", "a"]) == [("x", "z"), ("x", "a"), ("x", "a"), ("a", "x", "a")]
