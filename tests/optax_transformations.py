"""Every transformation of optax and optax.contrib, and why some cannot update a pipeline."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib


def at_least_2d(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


def freeze_vectors() -> Any:
    def mask(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim < 2, params)

    function: Any = mask
    return optax.freeze(function)


def with_sgd(*transformations: Any, rate: float = 0.01) -> Any:
    return optax.chain(*transformations, optax.sgd(rate))


def every_second(step: Any, *_: Any, **__: Any) -> Any:
    return step % 2 == 0


def schedule() -> Any:
    return optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 2, 10)


R = 1e-3
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(R),
    "adadelta": lambda: optax.adadelta(R),
    "adafactor": lambda: optax.adafactor(R, min_dim_size_to_factor=9),
    "adagrad": lambda: optax.adagrad(R),
    "adam": lambda: optax.adam(R),
    "adamax": lambda: optax.adamax(R),
    "adamaxw": lambda: optax.adamaxw(R),
    "adamw": lambda: optax.adamw(R),
    "adamw, mask": lambda: optax.adamw(R, weight_decay=0.5, mask=at_least_2d),
    "adamw, schedule": lambda: optax.adamw(schedule()),
    "adan": lambda: optax.adan(R),
    "amsgrad": lambda: optax.amsgrad(R),
    "fromage": lambda: optax.fromage(R),
    "lamb": lambda: optax.lamb(R),
    "lars": lambda: optax.lars(R),
    "lbfgs, no line search": lambda: optax.lbfgs(R, memory_size=2, linesearch=None),
    "lion": lambda: optax.lion(R),
    "nadam": lambda: optax.nadam(R),
    "nadamw": lambda: optax.nadamw(R),
    "noisy_sgd": lambda: optax.noisy_sgd(R, key=jax.random.key(0)),
    "novograd": lambda: optax.novograd(R),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(R),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(R),
    "polyak_sgd": lambda: optax.polyak_sgd(R),
    "radam": lambda: optax.radam(R),
    "rmsprop": lambda: optax.rmsprop(R, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(R),
    "sgd": lambda: optax.sgd(R, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(R),
    "signum": lambda: optax.signum(R),
    "sm3": lambda: optax.sm3(R),
    "yogi": lambda: optax.yogi(R),
    "adaptive_grad_clip": lambda: with_sgd(optax.adaptive_grad_clip(0.01)),
    "add_decayed_weights": lambda: with_sgd(optax.add_decayed_weights(0.1, mask=at_least_2d)),
    "add_noise": lambda: with_sgd(optax.add_noise(0.1, 0.5, key=jax.random.key(0))),
    "apply_every": lambda: with_sgd(optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(R), 3),
    "centralize": lambda: with_sgd(optax.centralize()),
    "clip": lambda: with_sgd(optax.clip(0.01)),
    "clip_by_block_rms": lambda: with_sgd(optax.clip_by_block_rms(1e-3)),
    "clip_by_global_norm": lambda: with_sgd(optax.clip_by_global_norm(1e-2)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(R), every_second),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adam(R), every_second),
    "ema": lambda: with_sgd(optax.ema(0.9)),
    "freeze": lambda: optax.chain(optax.adam(R), freeze_vectors()),
    "identity": lambda: with_sgd(optax.identity()),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule()),
    "keep_params_nonnegative": lambda: with_sgd(optax.keep_params_nonnegative()),
    "masked": lambda: optax.masked(optax.adam(R), at_least_2d),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(R), 2),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(R), "vector": optax.sgd(R)}, labels
    ),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(R))),
    "normalize_by_update_norm": lambda: with_sgd(optax.normalize_by_update_norm()),
    "scale_by_param_block_norm": lambda: with_sgd(optax.scale_by_param_block_norm()),
    "scale_by_param_block_rms": lambda: with_sgd(optax.scale_by_param_block_rms()),
    "scale_by_rss": lambda: with_sgd(optax.scale_by_rss(), rate=R),
    "scale_by_stddev": lambda: with_sgd(optax.scale_by_stddev(), rate=R),
    "scale_by_trust_ratio": lambda: with_sgd(optax.scale_by_trust_ratio()),
    "set_to_zero": optax.set_to_zero,
    "snapshot": lambda: with_sgd(optax.snapshot("norm", optax.tree.norm)),
    "stateless": lambda: with_sgd(optax.stateless(lambda u, p: jax.tree.map(jnp.sin, u))),
    "trace": lambda: with_sgd(optax.trace(0.9)),
    "zero_nans": lambda: with_sgd(optax.zero_nans()),
    "acprop": lambda: contrib.acprop(R),
    "ademamix": lambda: contrib.ademamix(R),
    "adopt": lambda: contrib.adopt(R),
    "cocob": lambda: contrib.cocob(R),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(R),
    "dog": lambda: contrib.dog(R),
    "dowg": lambda: contrib.dowg(R),
    "galore": lambda: contrib.galore(R, rank=2),
    "madgrad": lambda: contrib.madgrad(R),
    "mechanize": lambda: contrib.mechanize(optax.adam(R)),
    "momo": lambda: contrib.momo(R),
    "momo_adam": lambda: contrib.momo_adam(R),
    "muon": lambda: contrib.muon(R, weight_decay=0.1),
    "normalize": lambda: with_sgd(contrib.normalize()),
    "prodigy": contrib.prodigy,
    "reduce_on_plateau": lambda: optax.chain(optax.adam(R), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(optax.adam(R), optax.sgd(R), sync_period=2, reset_state=True),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(R, b1=0.0), R, b1=0.9),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(R),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(R),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(R),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(R)),
}
"""The transformations that a pipeline runs, as a user would call them."""


NEEDS_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
"""Those whose `update` is also given the loss, as `value=`."""
