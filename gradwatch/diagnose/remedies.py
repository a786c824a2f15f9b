"""Build the remedies of a case: a text, with settings for its config or code with the names of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwatch.diagnose import own_code
from gradwatch.diagnose.case import Case
from gradwatch.diagnose.conditions import SATURATING, START_STEPS
from gradwatch.diagnose.formulas import stable_formula
from gradwatch.diagnose.rates import drop_jump, lower_rate, raise_rate, rounded
from gradwatch.records import Remedy

CLIP_BY_USUAL = 2.0
"""Clipping limit in units of the usual norm: usual gradients pass unchanged."""

WEIGHT_DECAY = 0.1
"""Weight decay to propose: the largest usual value, because the default of AdamW was not enough."""

Build = Callable[[Case], Remedy | None]
Code = Callable[[Case], str]


def remedies(names: Sequence[str], case: Case) -> tuple[Remedy, ...]:
    """Build the remedies of a cause, in its order, without remedies that the run has already or that cannot help.

    Args:
        names: Names of remedies: keys of `KNOWN`.
        case: The findings that the cause explains, and their run.
    """
    made = [KNOWN[name](case) for name in names]
    return tuple(remedy for remedy in made if remedy is not None)


def _clip(case: Case) -> Remedy | None:
    kinds = [f.kind for f in case.findings]
    if "vanishing-gradient" in kinds or case.numbers.is_clipped:
        return None  # vanishing gradients are too small to clip, and clipped gradients are limited already
    # Adam's update cancels a norm that is large at every step, but its moments remember a single spike
    if case.ignores_scale and kinds[0] != "gradient-spike":
        return None
    # early in a run, the norms may all be too large, so they do not show the usual norm
    norm = rounded(CLIP_BY_USUAL * case.numbers.usual_norm) if case.step > START_STEPS else 1.0
    norm = norm if norm > 0 else 1.0  # False for nan
    text = f"clip the gradient norm at {norm:g} to limit the size of a single step"
    return _change(case, text, {"train.clip": {"norm": norm}}, own_code.clip_code(case, norm))


def _kaiming(case: Case) -> Remedy | None:
    if case.is_own_loop and case.numbers.is_kaiming:
        return None
    code = own_code.init_code(case, "kaiming_normal_({}, nonlinearity='relu')")
    patch: dict[str, Any] = {"model.init": "kaiming"}
    if case.settings.get("model.gain") is not None:  # it would scale the weights of Kaiming initialization as well
        patch["model.gain"] = None
    return _change(case, "use Kaiming initialization", patch, code)


def _relu_kaiming(case: Case) -> Remedy | None:
    text = "replace the saturating activations by ReLU, and use Kaiming initialization"
    code = own_code.activation_code(case, SATURATING, "ReLU")
    code += "\n" + own_code.init_code(case, "kaiming_normal_({}, nonlinearity='relu')")
    return _change(case, text, {"model.activation": "relu", "model.init": "kaiming"}, code)


def _xavier(case: Case) -> Remedy | None:
    # the slope of a sigmoid is at most 0.25: at unit gain its gradient still vanishes
    if {a.module_type for a in case.info.activations} & set(SATURATING) - {"Tanh", "Hardtanh"}:
        return None
    code = own_code.init_code(case, "xavier_normal_({}, gain=5 / 3)")
    return _change(case, "use Xavier initialization, made for tanh", {"model.init": "xavier"}, code)


def _normalize(case: Case) -> Remedy | None:
    if any("Norm" in layer.module_type for layer in case.info.layers):
        return None
    code = own_code.insertion_code(case)
    return _change(case, "add normalization between the layers", {"model.normalization": "batch"}, code)


def _nonlinear(case: Case) -> Remedy | None:
    code = own_code.insertion_code(case, new="ReLU()")
    return _change(case, "add a nonlinearity, such as ReLU, between the layers", {"model.activation": "relu"}, code)


def _residual(case: Case) -> Remedy | None:
    if case.is_own_loop:  # the history does not show whether the model has residual connections
        return None
    text = "use ReLU, residual connections and batch normalization"
    patch = {"model.activation": "relu", "model.residual": True, "model.normalization": "batch"}
    return _change(case, text, patch, "")


def _weight_decay(case: Case) -> Remedy | None:
    if case.settings.get("optim.weight_decay", 0.0) >= WEIGHT_DECAY:
        return None
    return _change(case, "add weight decay", {"optim.weight_decay": WEIGHT_DECAY}, "")


def _find_operation(case: Case) -> Remedy:
    how = "gradwatch.locate(step, batch)" if case.is_own_loop else "gradwatch replay"
    return Remedy(text=f"find the operation with {how}, and guard it against overflow")


def _bf16(case: Case) -> Remedy | None:
    device = case.info.device.partition(":")[0]
    code = f'with torch.autocast("{device}", dtype=torch.bfloat16):\n    loss = ...  # without a GradScaler'
    return _change(case, "use bfloat16, which has the exponent range of float32", {"train.precision": "bf16"}, code)


def _change(case: Case, text: str, patch: dict[str, Any], code: str) -> Remedy | None:
    """Return a remedy as settings of the config, as code in an own loop, or None if the run has it already."""
    if case.is_own_loop or not _has_options(case, patch):
        return Remedy(text=text, code=code)
    # keep only the settings that the run does not have yet
    needed = {key: value for key, value in patch.items() if case.accepts({key: value})}
    return Remedy(text=text, patch=needed) if needed else None


def _has_options(case: Case, patch: dict[str, Any]) -> bool:
    return all(key == "schedule" or case.has(key) for key in patch)


def _fixed(text: str, code: str | Code = "", **patch: object) -> Build:
    """Return a builder of a remedy with fixed settings or code; two underscores in a keyword stand for a dot.

    Args:
        text: Sentence; {where} stands for the layers.
        code: Lines of an own loop, or a function that writes them.
        patch: Settings. Without settings, a training from a config gets the code as well.
    """
    keys = {key.replace("__", "."): value for key, value in patch.items()}

    def build(case: Case) -> Remedy | None:
        lines = code(case) if callable(code) else code
        filled = text.replace("{where}", case.where)
        return _change(case, filled, dict(keys), lines) if keys else Remedy(text=filled, code=lines)

    return build


def _leaky_code(case: Case) -> str:
    return own_code.activation_code(case, ("ReLU",), "LeakyReLU")


SCALER = """scaler = torch.amp.GradScaler()  # once, before the loop
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()"""

STANDARDIZE = """mean, std = train_inputs.mean(0), train_inputs.std(0)  # of the training data, once
inputs = (inputs - mean) / (std + 1e-8)"""

KNOWN: dict[str, Build] = {
    "lower_rate": lower_rate,
    "drop_jump": drop_jump,
    "raise_rate": raise_rate,
    "clip": _clip,
    "reattach": _fixed(
        "reconnect {where} to the loss: look for detach(), no_grad(), .data or .item() after it, or an unused "
        "output; if this is intended, freeze it with requires_grad_(False)"
    ),
    "relu_kaiming": _relu_kaiming,
    "relu_residual_norm": _residual,
    "leaky_relu": _fixed(
        "use LeakyReLU, which has a gradient for negative inputs too", _leaky_code, model__activation="leaky_relu"
    ),
    "normalize": _normalize,
    "kaiming": _kaiming,
    "xavier": _xavier,
    "scaler": _fixed("enable loss scaling with a GradScaler", SCALER, train__scaler__enabled=True),
    "init_scale": _fixed(
        "reset the loss scale to 65536",
        "scaler = torch.amp.GradScaler(init_scale=65536.0)",
        train__scaler__init_scale=65536.0,
    ),
    "bf16": _bf16,
    "shuffle": _fixed("shuffle the training data", "DataLoader(..., shuffle=True)", data__shuffle=True),
    "per_epoch": _fixed(
        "step the schedule once per epoch", "scheduler.step()  # after the loop over batches", schedule__per="epoch"
    ),
    "return_factor": _fixed(
        "let the function of the schedule return a factor, which is 1 at the full learning rate",
        "scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))",
    ),
    "early_stop": _fixed(
        "stop early when the validation loss no longer falls, and keep the best checkpoint",
        train__early_stop={"metric": "val_loss", "patience": 3},
    ),
    "weight_decay": _weight_decay,
    "augment": _fixed("augment the training data, collect more, or use a smaller model or dropout"),
    "find_operation": _find_operation,
    "stable_formula": stable_formula,
    "clean_data": _fixed(
        "find and fix the bad samples of that batch; check the range, labels and normalization of all samples"
    ),
    "standardize": _fixed(
        "normalize the inputs of {where} to mean 0 and standard deviation 1", STANDARDIZE, data__standardize=True
    ),
    "leave_out_empty": _fixed(
        "skip batches in which every label is ignored, or divide the summed loss by max(number of labels, 1)",
        'loss = F.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)',
    ),
    "count_terms": _fixed(
        "check that labels and mask leave terms in the loss, and raise the margin above the initial distances"
    ),
    "inspect_inputs": _fixed("print a batch just before the model, and fix the transform that makes its samples equal"),
    "copy_samples": _fixed("copy each sample before you keep it: memory.append(state.copy()), or state.clone()"),
    "split_workers": _fixed(
        "give each worker its own part: an IterableDataset asks torch.utils.data.get_worker_info() which one it is; "
        "a data set that draws with NumPy seeds it with torch.initial_seed() % 2**32 in worker_init_fn"
    ),
    "inspect_labels": _fixed(
        "count the labels of an epoch, and fix the code that makes them equal; shuffle sorted data"
    ),
    "weigh_classes": _fixed(
        "if the rare classes matter, weight them more in the loss, draw them more often, or lower the threshold",
        "loss_fn = torch.nn.BCEWithLogitsLoss(pos_weight=num_negative / num_positive)",
    ),
    "average_last": _fixed(
        "take the mean of the squared errors, not the square of the mean error",
        "loss = (model(inputs) - targets).square().mean()",
    ),
    "own_targets": _fixed("compare each output with the target of its own sample"),
    "free_bits": _fixed(
        "sum both the error and the divergence over the values of a sample; raise the weight of the divergence "
        "slowly from 0, and drop some inputs of a decoder that sees its own outputs"
    ),
    "match_names": _fixed(
        "rename the entries of the state to match the model, and load with strict=True",
        'model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})',
    ),
    "copy_state": _fixed("copy the state that is kept", "best = copy.deepcopy(model.state_dict())"),
    "watch_again": _fixed(
        "close the monitor, and call gradwatch.watch with the new model and optimizer: one run for each",
        "monitor.close()\nmonitor = gradwatch.watch(model, optimizer)",
    ),
    "update_copy": _fixed(
        "update the copy from the trained model, with a decay below 1; keep an average in float32",
        "for kept, new in zip(target.parameters(), model.parameters()):\n    kept.data.lerp_(new.data, 0.01)",
    ),
    "build_once": _fixed("build the optimizer and its scheduler once, before the loop"),
    "clip_first": _fixed("clip the gradients after loss.backward() and before optimizer.step()"),
    "step_once": _fixed("call optimizer.step() once after each backward pass, or once per group of micro-batches"),
    "clear_later": _fixed("call optimizer.zero_grad() after optimizer.step(), or before loss.backward()"),
    "set_read": _fixed("call module.requires_grad_(False) to freeze weights, and set group['lr'] of each param_group"),
    "seed_once": _fixed("call torch.manual_seed once, before the loop"),
    "own_parameters": _fixed("give each optimizer the parameters of its own network only, and leave out {where}"),
    "call_backward": _fixed(
        "call loss.backward() before optimizer.step(); between the model and the loss, leave out detach(), .data, "
        ".item(), .numpy() and torch.no_grad()",
        "loss.backward()",
    ),
    "call_step": _fixed("call optimizer.step() after loss.backward()", "optimizer.step()"),
    "make_updates": _fixed(
        "find out why optimizer.step() changes nothing: gradients cleared too early, a step that returns at once"
    ),
    "keep_labels": _fixed(
        "find out why no label is left: a sequence cut off before its answer, a mask that is too strict"
    ),
    "nonlinear": _nonlinear,
    "divide_scores": _fixed(
        "divide the scores before {where} by the square root of their dimension; if they already are, start with "
        "smaller embeddings or weights",
        "scores = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5",
    ),
    "fewer_passes": _fixed(
        "make fewer passes over the same samples, or stop once the divergence is above 0.05",
        "if divergence > 0.05:\n    break  # collect new samples",
    ),
    "same_log_probs": _fixed(
        "compute the old log-probabilities like the new ones: same samples, same mode, same sum over dimensions"
    ),
    "normalize_queries": _fixed(
        "normalize queries and keys before their product (QK-norm)",
        "queries, keys = (torch.nn.functional.rms_norm(x, x.shape[-1:]) for x in (queries, keys))",
    ),
    "balance_experts": _fixed(
        "add a load-balancing loss for {where}, with a weight of 0.01: the share of each expert times its mean "
        "probability",
        "share = torch.nn.functional.one_hot(chosen, num_experts).float().mean(0)\n"
        "loss = loss + 0.01 * num_experts * (share * probabilities.mean(0)).sum()",
    ),
    "calm_router": _fixed(
        "keep the logits of {where} small (router z-loss), and give it a lower learning rate or a longer warm-up",
        "loss = loss + 1e-3 * router_logits.logsumexp(-1).square().mean()",
    ),
    "single_unit": _fixed(
        "use a sigmoid with BCEWithLogitsLoss on a single output unit, or a softmax over all classes"
    ),
    "freeze_target": _fixed("compute the targets with a frozen copy of the model, updated every few hundred steps"),
    "open_gate": _fixed("check what multiplies {where}: open its gate, or train the scale of its normalization"),
    "fix_offset": _fixed(
        "add a term of the outputs themselves to the loss, such as a boundary or an initial value; if only derivatives "
        "matter, freeze {where}"
    ),
    "several_steps": _fixed(
        "give {where} sequences of several steps, of shape (batch, steps, features) with batch_first=True, or replace "
        "the layer by a linear one"
    ),
    "hold_parameters": _fixed(
        "build the optimizer after the model is complete, and pass it the parameters of {where}",
        own_code.parameters_code,
    ),
    "register": _fixed(
        "create each parameter in __init__, before the optimizer is built, and keep {where} in nn.ModuleList, "
        "nn.ModuleDict or nn.ParameterList"
    ),
    "balance_tasks": _fixed("normalize the targets, or weight the losses so that {where} does not dominate"),
    "over_classes": _fixed("apply the softmax over the classes: dim=1"),
    "master_weights": _fixed("keep the weights of {where} in float32, and use autocast for the forward pass"),
    "small_embeddings": _fixed("initialize {where} with a standard deviation of 0.02 to 0.1", own_code.embedding_code),
    "zero_grad": _fixed("call optimizer.zero_grad() once per update", "optimizer.zero_grad()  # before backward()"),
    "advance_iterator": _fixed(
        "draw a new batch at each step, from an iterator that is created once, before the loop, and do not seed a "
        "generator inside the loop"
    ),
    "fit_range": _fixed("remove {where} from the output, or scale the targets to its range", own_code.output_code),
    "bound_loss": _fixed(
        "check the sign of the loss, and bound it, such as by a penalty on the critic's gradient, spectral "
        "normalization, a penalty on energies, or vectors of length 1"
    ),
    "bound_divisor": _fixed(
        "clamp the divisor near its usual size, or leave out samples without a deviation", "x / s.clamp(min=0.1)"
    ),
    "divide_sums": _fixed(
        "divide each sum by the square root of its number of terms; in a graph, normalize by node degree"
    ),
    "larger_batch": _fixed(
        "accumulate more micro-batches per step, or use larger ones, up to the gradient noise scale"
    ),
    "average_gradients": _fixed(
        "call the wrapped model, and leave no_sync() before the last micro-batch",
        "loss = criterion(ddp_model(inputs), targets)  # not ddp_model.module",
    ),
    "clip_after_average": _fixed(
        "clip after averaging over the ranks",
        "average_gradients(model)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    ),
    "divide_by_ranks": _fixed(
        "divide the summed gradients by the number of ranks, once", "param.grad /= torch.distributed.get_world_size()"
    ),
    "broadcast_weights": _fixed(
        "broadcast parameters and buffers from rank 0 before the first step, and load checkpoints on all ranks",
        "for tensor in (*model.parameters(), *model.buffers()):\n    torch.distributed.broadcast(tensor.data, 0)",
    ),
    "load_optimizer": _fixed(
        "load the state of the optimizer on all ranks",
        "optimizer.load_state_dict(torch.load(path, map_location=device))  # on every rank",
    ),
    "split_data": _fixed(
        "split the data over the ranks with a DistributedSampler, and call set_epoch before each epoch",
        "sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, sampler=sampler)",
    ),
    "set_epoch": _fixed(
        "call sampler.set_epoch(epoch) before each epoch",
        "for epoch in range(epochs):\n    sampler.set_epoch(epoch)",
    ),
    "record_ranks": _fixed(
        "guard the formula against the values of that batch; record=True on all ranks saves the state of each step"
    ),
    "same_rates": _fixed("step the scheduler on all ranks, with a validation loss that is averaged over the ranks"),
    "sync_statistics": _fixed(
        "use SyncBatchNorm, or leave broadcast_buffers on",
        "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    ),
    "seed_by_rank": _fixed(
        "seed each rank differently, after the model is made", "torch.manual_seed(seed + torch.distributed.get_rank())"
    ),
    "detach_kept": _fixed(
        "keep only numbers or detached tensors after a step", "total += loss.detach()  # not: total += loss"
    ),
    "no_grad": _fixed("evaluate without autograd", "with torch.inference_mode():\n    output = model(inputs)"),
    "bound_collection": _fixed(
        "keep a fixed number of items, or write them to disk", "recent = collections.deque(maxlen=1000)"
    ),
    "expandable_segments": _fixed(
        "let the allocator extend its blocks: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    ),
    "smaller_batch": _fixed(
        "use smaller batches, and accumulate the gradients of several",
        "(loss / 2).backward()  # of each half of the batch, before one optimizer.step()",
    ),
    "drop_activation": _fixed(
        "return logits from {where}: remove the last activation from forward, and apply a softmax or sigmoid to the "
        "predictions only",
        own_code.output_code,
    ),
    "set_mode": _fixed(
        "call model.train() before every training pass, and model.eval() before every validation", "model.train()"
    ),
    "group_norm": _fixed("use GroupNorm or LayerNorm in {where}, or re-estimate the running statistics"),
    "check_shapes": _fixed(
        "make predictions and targets equal in shape, and check that labels match their inputs",
        "assert predictions.shape == targets.shape",
    ),
    "batch_first": _fixed(
        "pass batch_first=True to {where} (a transformer layer passes it on), or give it inputs of shape "
        "(steps, samples, features)"
    ),
    "shift_once": _fixed(
        "shift the labels in one place only: pass unshifted labels to a model that shifts them itself",
        "loss = model(tokens, labels=tokens).loss",
    ),
    "last_token": _fixed(
        "read {where} at the last token of each sequence, or pack the sequences",
        "packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)",
    ),
    "invert_mask": _fixed(
        "invert the mask of {where}",
        "encoder(embedded, src_key_padding_mask=tokens == padding)",
    ),
    "shift_inputs": _fixed(
        "shift the inputs of {where} by one position, or hide the tokens that it has to predict",
        "inputs, labels = tokens[:, :-1], tokens[:, 1:]",
    ),
    "causal_mask": _fixed(
        "let no position of {where} see later positions: pass a causal mask, or use a single direction",
        "F.scaled_dot_product_attention(query, key, value, is_causal=True)",
    ),
    "check_sign": _fixed(
        "call backward() on a value that should fall: check the sign of the loss and of each of its terms, and "
        "that the optimizer does not have maximize=True",
        "loss = -log_likelihood.mean()",
    ),
    "less_decay": _fixed(
        "lower the weight decay, or the penalty on the weights, to 0.01",
        'for group in optimizer.param_groups:\n    group["weight_decay"] = 0.01',
        optim__weight_decay=0.01,
    ),
    "copy_buffers": _fixed(
        "copy the buffers at each update of the average, or call torch.optim.swa_utils.update_bn before evaluating it",
        "for kept, new in zip(average.buffers(), model.buffers()):\n    kept.data.copy_(new.data)",
    ),
    "keep_rate": _fixed(
        "keep the rate of a forward pass in a local variable, and do not overwrite the attribute",
        "p = self.p if self.training else 0.0",
    ),
    "subtract_entropy": _fixed(
        "subtract the entropy of the policy from the loss", "loss = policy_loss - 0.01 * entropy.mean()"
    ),
}
"""All remedies by their names in the table of causes."""
