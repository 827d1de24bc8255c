"""state_dict(): no weights, and which tables they are in."""

import io

import pytest
import torch
from torch import nn

import evershard as es
from evershard.torch import Embedding, EmbeddingBag, EmbeddingGroup


def make(cluster, name, dim=3):
    return cluster.create_table(name, dim=dim, optimizer=es.SGD(lr=1.0))


def test_a_state_names_the_tables_and_loads_where_they_are_the_same(cluster, name):
    users, tags = make(cluster, f"{name}-users"), make(cluster, f"{name}-tags", 5)
    model = lambda: nn.ModuleDict(  # noqa: E731
        {
            "group": EmbeddingGroup({"user": Embedding(table=users), "tags": EmbeddingBag(table=tags)}),
            "head": nn.Linear(8, 1),
        }
    )
    saved = model()
    state = saved.state_dict()
    assert state["group.embeddings.user._extra_state"] == {"table": users.name, "number": users.number, "dim": 3}
    assert state["group.embeddings.tags._extra_state"] == {"table": tags.name, "number": tags.number, "dim": 5}
    assert {key for key, value in state.items() if isinstance(value, torch.Tensor)} == {"head.weight", "head.bias"}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = model()
    loaded.load_state_dict(torch.load(file))
    assert torch.equal(loaded["head"].weight, saved["head"].weight)


def test_a_state_of_another_table_is_refused(cluster, name):
    state = Embedding(table=make(cluster, name)).state_dict()
    with pytest.raises(ValueError, match=f"of table '{name}', but the module has table '{name}-other'"):
        Embedding(table=make(cluster, f"{name}-other")).load_state_dict(state)
    cluster.drop_table(name)
    with pytest.raises(ValueError, match="made anew"):
        Embedding(table=make(cluster, name)).load_state_dict(state)
    cluster.drop_table(name)
    with pytest.raises(ValueError, match="has dim 4, but had 3"):
        Embedding(table=make(cluster, name, 4)).load_state_dict(state)
    with pytest.raises(RuntimeError, match="weight"):
        Embedding(table=cluster.table(name)).load_state_dict(nn.Embedding(3, 4).state_dict())
    with pytest.raises(ValueError, match="not what"):
        Embedding(table=cluster.table(name)).load_state_dict({"_extra_state": {"table": name}})
