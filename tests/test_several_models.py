"""Two sharded models in one graph: backward of one's loss runs through the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import features, mlp
from ranks import run

import zerostage


def play(rank: int, n: int, stage: int | None, freeze: bool) -> dict[str, torch.Tensor]:
    """Five alternate steps of a GAN; without a stage, plain torch on the batches of all ranks.

    In the generator's step the discriminator is frozen, or its gradients are made and dropped.
    """
    generator, critic = mlp(4, 16, 8, seed=1), mlp(8, 16, 1, seed=2)
    models = {"generator": generator, "critic": critic}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    if stage is not None:
        for name, model in models.items():
            zerostage.shard(model, optimizers[name], stage=stage)
    ranks = range(n) if stage is None else [rank]

    def mean(loss) -> torch.Tensor:
        return torch.stack([loss(*features(r, step)) for r in ranks]).mean()

    for step in range(5):
        mean(lambda real, z: F.softplus(-critic(real)).mean() + F.softplus(critic(generator(z).detach())).mean()).backward()
        optimizers["critic"].step()
        critic.zero_grad()
        critic.requires_grad_(not freeze)
        mean(lambda real, z: F.softplus(-critic(generator(z))).mean()).backward()
        optimizers["generator"].step()
        generator.zero_grad()
        critic.zero_grad()
        critic.requires_grad_(True)
    states = {}
    for name, model in models.items():
        whole = model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)
        states |= {f"{name}.{key}": value for key, value in whole.items()}
        if stage is not None:
            zerostage.close(model)
    return states


WAYS = [(stage, freeze) for stage in range(4) for freeze in (True, False)]


def in_every_way(rank: int, n: int) -> list[dict[str, torch.Tensor]]:
    return [play(rank, n, stage, freeze) for stage, freeze in WAYS]


def test_O3_generator_and_discriminator_in_one_graph() -> None:
    oracles = {freeze: play(0, 2, None, freeze) for freeze in (True, False)}
    for states in run(in_every_way, n=2):
        for (stage, freeze), state in zip(WAYS, states):
            # 1e-6: the mean over ranks is summed in another order
            torch.testing.assert_close(state, oracles[freeze], atol=1e-6, rtol=0, msg=lambda m: f"{stage} {freeze}: {m}")
