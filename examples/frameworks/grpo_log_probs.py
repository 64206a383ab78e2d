# SPDX-License-Identifier: Apache-2.0
"""GRPO on groups of responses, each prompt once: log-probabilities of a Llama of transformers, over several ranks.

A prompt and its responses are a prefix tree, in which a response sees its prompt and itself. This line starts two
processes on CPUs:

    torchrun --nproc-per-node 2 examples/frameworks/grpo_log_probs.py

This one starts 8 GPUs, as 2 replicas of 4 ranks that share a tree:

    torchrun --nproc-per-node 8 examples/frameworks/grpo_log_probs.py --cp-size 4 --prompt 4096 --response 2048

Losses are the same for any number of ranks. On GPUs FSDP2 computes in bfloat16.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from magi_attention.api import set_gradient_sum
from magi_attention.integrations.prefix_trees import PrefixTreeBatch, PrefixTreeCollator
from magi_attention.integrations.transformers import register

VOCABULARY = 64


def make_groups(args: argparse.Namespace, seed: int) -> list[dict]:
    """Prompts with responses of unequal length, and the reward of each response. A real run samples responses from its
    policy; here they are random tokens, and the reward is the share of even ones."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(longest: int) -> Tensor:
        length = int(torch.randint(longest // 2, longest + 1, (), generator=draw))
        return torch.randint(0, VOCABULARY, (length,), generator=draw)

    groups = []
    for _ in range(args.groups):
        responses = [tokens(args.response) for _ in range(args.responses)]
        rewards = torch.stack([(x % 2 == 0).float().mean() for x in responses])
        groups.append({"prompt_ids": tokens(args.prompt), "response_ids": responses, "rewards": rewards})
    return groups


def advantages_of(group: dict) -> Tensor:
    rewards = group["rewards"]
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def make_model(args: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=2,
        num_attention_heads=args.width // 64, num_key_value_heads=args.width // 128, head_dim=64,
        max_position_embeddings=args.prompt + args.response, attn_implementation="magi",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    is_gpu = device.type == "cuda"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_gpu else torch.float32, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy)
    set_gradient_sum(model)  # over dp and cp: losses of all ranks add up
    return model


class Tree:
    """This rank's part of the groups of its replica. Log-probabilities are (N,), of the N tokens that it predicts."""

    def __init__(self, groups: list[dict], mesh: DeviceMesh, device: torch.device) -> None:
        group, cp_rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
        batch: PrefixTreeBatch = PrefixTreeCollator(dist.get_world_size(group), cp_rank)(groups)
        ids, positions, plans = (batch.inputs[name] for name in ("input_ids", "position_ids", "magi_plans"))
        self.inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device)}
        self.inputs |= {"magi_plans": plans.in_group(group), "use_cache": False}
        self.batch = batch
        self.advantages = torch.cat([advantages_of(x) for x in groups])[batch.responses].to(device)
        self.lengths = torch.tensor(batch.lengths)[batch.responses].to(device)

    def log_probs(self, model: LlamaForCausalLM) -> Tensor:
        return self.batch.log_probs(model(**self.inputs).logits[0])

    def loss(self, log_probs: Tensor, old: Tensor, clip: float, responses: int) -> Tensor:
        """This rank's share of the clipped loss: the mean over ``responses``, of all ranks, of the mean over tokens."""
        ratio = (log_probs - old).exp()
        gain = torch.minimum(ratio * self.advantages, ratio.clamp(1 - clip, 1 + clip) * self.advantages)
        return -(gain / self.lengths).sum() / responses


def train(args: argparse.Namespace, device: torch.device) -> None:
    world, cp_size = dist.get_world_size(), args.cp_size or dist.get_world_size()
    if world % cp_size:
        raise SystemExit(f"--cp-size is {cp_size}; give a divisor of the {world} ranks.")
    if args.groups % (replicas := world // cp_size):
        raise SystemExit(f"--groups is {args.groups}; give a multiple of the {replicas} replicas.")
    mesh = init_device_mesh(device.type, (replicas, cp_size), mesh_dim_names=("dp", "cp"))
    model = make_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for round_ in range(args.rounds):
        groups = make_groups(args, round_)
        tree = Tree(groups[mesh.get_local_rank("dp") :: replicas], mesh, device)
        with torch.no_grad():
            old = tree.log_probs(model)
        for step in range(args.steps):
            optimizer.zero_grad()
            loss = tree.loss(tree.log_probs(model), old, args.clip, args.groups * args.responses)
            loss.backward()
            optimizer.step()
            total = loss.detach()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"round {round_ + 1}  step {step + 1}  loss {total.item():.7f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"cp-size": 0, "groups": 2, "responses": 4, "prompt": 48, "response": 24, "width": 128, "rounds": 2}
    for name, default in {**numbers, "steps": 4, "clip": 0.2, "learning-rate": 3e-4}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    train(args, device)
    gc.collect()  # nothing may keep a group alive beyond its end
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
