"""Communities: groups that are there are found, and dealing selections out anew keeps every load."""

import numpy as np

from some_moe.glass.inspect.communities import count_pairs, find_communities, measure_communities, shuffle_selections


def choose_in_groups(num_tokens: int, share: float, seed: int = 0) -> np.ndarray:
    """Two experts a token out of eight: with chance `share` both of one half, else of any."""
    random = np.random.default_rng(seed)
    half = random.integers(0, 2, num_tokens)[:, None] * 4
    inside = half + random.permuted(np.tile(np.arange(4), (num_tokens, 1)), axis=1)[:, :2]
    anywhere = random.permuted(np.tile(np.arange(8), (num_tokens, 1)), axis=1)[:, :2]
    return np.where(random.random(num_tokens)[:, None] < share, inside, anywhere)


def test_pairs_count_tokens_that_chose_both() -> None:
    pairs = count_pairs(np.array([[0, 1], [1, 0], [2, 1]]), 4)
    assert pairs.tolist() == [[2, 2, 0, 0], [2, 3, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_planted_groups_are_found_and_beat_chance() -> None:
    found = measure_communities(choose_in_groups(600, 0.9), 8, num_shuffles=19, random=np.random.default_rng(1))
    assert found["groups"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["p_value"] == 1 / 20
    assert found["modularity"] > found["null_mean"] + 5 * found["null_sd"]


def test_selections_without_groups_do_not_beat_chance() -> None:
    beaten = sum(
        measure_communities(choose_in_groups(300, 0.0, seed), 8, num_shuffles=19, random=np.random.default_rng(seed))[
            "p_value"
        ]
        <= 0.05
        for seed in range(20)
    )
    assert beaten <= 4  # 1 expected


def test_dealing_out_anew_keeps_loads_and_gives_no_expert_twice() -> None:
    experts = choose_in_groups(500, 0.9)
    mixed = shuffle_selections(experts, np.random.default_rng(2))
    assert (np.bincount(mixed.ravel()) == np.bincount(experts.ravel())).all()
    assert (mixed[:, 0] != mixed[:, 1]).all()
    assert count_pairs(mixed, 8)[:4, :4].sum() < count_pairs(experts, 8)[:4, :4].sum()


def test_experts_that_are_never_chosen_belong_nowhere() -> None:
    assert find_communities(np.zeros((4, 4)), 0) == ([], 0.0)
    groups, _ = find_communities(count_pairs(np.array([[0, 1], [0, 1]]), 4), 0)
    assert groups == [[0, 1]]
