"""PPO in pipeline stages, a process each: a policy, a frozen reference and a critic on the same stages. An iteration generates responses to
beginnings of paragraphs, scores them, takes the reference's log-probabilities and the critic's values, and trains critic and policy with
the interfaces of examples/engine/ppo_interface.py, without logits of a batch. It fails where scores have not risen.

    python examples/engine_ppo.py                       # CPU, or GPUs where there are any: about a minute
    python examples/engine_ppo.py --tiny                # for tests: seconds
    python examples/engine_ppo.py --adaptive-kl --kl-ctl 0.05 --early-stop-kl 0.5 --entropy-coef 0.01

The score of a response is the share of small letters and spaces among its bytes, from -1 (none) to 1 (all): a policy of random weights has
about -0.8. The models are Llamas of random weights and a token is a byte. Every response has --new-tokens of them, which is its end.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from engine.functional import rows_sequence, sum_by_sequence
from engine.model_api import Data, Model, from_last_stage
from engine.ppo_interface import PPOActorInterface, PPOCriticInterface
from engine.processes import Place, run_stages, transport
from engine.text import ByteTokenizer, Paragraphs, packed

from flce.engine import GenerationConfig, PipelineEngine, causal_lm_stage


def score(data: Data) -> torch.Tensor:
    """[B] fp32, in a reward model's place."""
    ids, cu_seqlens = data["packed_input_ids"], data["cu_seqlens"]
    liked = ((ids >= ord("a")) & (ids <= ord("z")) | (ids == ord(" "))) & ~data["prompt_mask"]
    lengths = sum_by_sequence(~data["prompt_mask"], cu_seqlens)
    return (2 * sum_by_sequence(liked, cu_seqlens) / lengths - 1).float()


def prompts(text: Paragraphs, step: int, number: int) -> Data:
    """Beginnings of 4 to 11 bytes."""
    data = text.batch(step, number)
    sequence = rows_sequence(data["cu_seqlens"], data["packed_input_ids"].numel())
    rows = [data["packed_input_ids"][sequence == b][: 4 + b % 8].tolist() for b in range(number)]
    return packed(rows)


def make_model(place: Place, arguments: argparse.Namespace, *, critic: bool = False, learning_rate: float | None = None) -> Model:
    """A model's stage in an engine; without a learning rate it is not trained."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=not critic,
        initializer_range=0.1,
    )
    stage = causal_lm_stage(config, place.rank, place.num_stages, critic=critic, device=place.device)
    optimizer = None if learning_rate is None else torch.optim.AdamW(stage.parameters(), lr=learning_rate, weight_decay=0.0)
    engine = PipelineEngine(stage, place.group, optimizer, schedule=arguments.schedule, max_grad_norm=1.0, normalize="tokens")
    return Model(engine, ByteTokenizer())


def train(place: Place, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """One stage's process; statistics of each iteration on the last stage."""
    actor = make_model(place, arguments, learning_rate=arguments.learning_rate)
    reference = make_model(place, arguments)  # one seed, so the policy's first weights
    critic = make_model(place, arguments, critic=True, learning_rate=3 * arguments.learning_rate)
    shared: dict[str, Any] = {
        "n_minibatches": arguments.minibatches,
        "kl_ctl": arguments.kl_ctl,
        "adaptive_kl_ctl": arguments.adaptive_kl,
        "adaptive_kl_target": arguments.kl_target,
        "adaptive_kl_horizon": 20.0 * arguments.sequences,
        "gae_lambda": 0.95,
    }
    policy = PPOActorInterface(
        gconfig=GenerationConfig(max_new_tokens=arguments.new_tokens, min_new_tokens=arguments.new_tokens),
        entropy_coef=arguments.entropy_coef,
        early_stop_kl=arguments.early_stop_kl,
        **shared,
    )
    values = PPOCriticInterface(**shared)
    text = Paragraphs(64)
    history = []
    for step in range(arguments.iterations):
        data = from_last_stage(actor.module, policy.generate(actor, prompts(text, step, arguments.sequences), seed=step))
        data |= from_last_stage(actor.module, policy.inference(reference, data))
        data |= from_last_stage(actor.module, values.inference(critic, data))
        data["rewards"] = score(data)
        data["seq_no_eos_mask"] = torch.zeros_like(data["seq_no_eos_mask"])  # all of them are whole
        stats = values.train_step(critic, data) | policy.train_step(actor, data)
        if stats:
            history.append(stats)
            print(
                f"iteration {step + 1:>3}: score {stats['task_reward']:+.3f}; KL {stats['kl']:.3f} nats a response to the reference (times "
                f"{stats['kl_ctl']:.3f}), {stats['ppo_approx_kl']:.4f} a token to the old policy; {stats['actor_clip_ratio']:.1%} clipped; "
                f"value loss {stats['value_loss']:.4f}; {stats['n_minibatches']:.0f} minibatches",
                flush=True,
            )
    return history


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="fewer iterations of a smaller model, for tests")
    parser.add_argument("--stages", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="default: 1f1b")
    parser.add_argument("--layers", type=int, help="default: 2, or a layer for each stage")
    parser.add_argument("--hidden-size", type=int, help="a multiple of 8 (default: 64, with --tiny 32)")
    parser.add_argument("--iterations", type=int, help="default: 16, with --tiny 8")
    parser.add_argument("--sequences", type=int, default=64, help="responses of an iteration (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=8, help="bytes of a response (default: 8)")
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer steps of an iteration (default: 4)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="of the policy; the critic's is three times it (default: 0.01)")
    parser.add_argument("--kl-ctl", type=float, default=0.01, help="coefficient of the KL penalty (default: 0.01)")
    parser.add_argument("--adaptive-kl", action="store_true", help="the coefficient follows --kl-target")
    parser.add_argument("--kl-target", type=float, default=6.0, help="nats a response (default: 6)")
    parser.add_argument("--entropy-coef", type=float, default=0.0, help="what the mean entropy is rewarded with (default: 0)")
    parser.add_argument("--early-stop-kl", type=float, help="KL to the old policy above which an iteration's minibatches end")
    arguments = parser.parse_args()
    arguments.layers = max(2, arguments.stages) if arguments.layers is None else arguments.layers
    arguments.hidden_size = arguments.hidden_size or (32 if arguments.tiny else 64)
    arguments.iterations = (8 if arguments.tiny else 16) if arguments.iterations is None else arguments.iterations
    if not 1 <= arguments.stages <= arguments.layers:
        parser.error(f"--stages is {arguments.stages}; a model of {arguments.layers} layers has 1 to {arguments.layers} stages")
    if arguments.minibatches < 1 or arguments.sequences < arguments.stages * arguments.minibatches:
        parser.error(
            f"--sequences is {arguments.sequences}; --minibatches {arguments.minibatches} of {arguments.stages} microbatches each need "
            f"{max(arguments.minibatches, 1) * arguments.stages} or more"
        )
    if arguments.iterations < 2:
        parser.error(f"--iterations is {arguments.iterations}; scores of the first and the last are compared")
    if arguments.hidden_size < 8 or arguments.hidden_size % 8:
        parser.error(f"--hidden-size is {arguments.hidden_size}; it must be a multiple of 8")
    return arguments


def main() -> int:
    arguments = parsed()
    backend, kind = transport(arguments.stages)
    print(f"{arguments.stages} stages on {kind} over {backend}, schedule {arguments.schedule}", flush=True)
    scores = [stats["task_reward"] for stats in run_stages(train, arguments.stages, arguments)]
    third = max(1, len(scores) // 4)
    first, last = sum(scores[:third]) / third, sum(scores[-third:]) / third
    print(f"mean score of the first {third} iterations {first:+.3f}, of the last {third} {last:+.3f}")
    if not last > first:
        print("scores have not risen", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
