"""List the mistakes that `gradwatch check` names, in gradients and in training steps: code, meaning and remedy."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """One kind of mistake.

    Args:
        code: Its code, which never changes.
        meaning: The mistake, and its symptom.
        remedy: The fix.
    """

    code: str
    meaning: str
    remedy: str


IN_GRADIENTS = {
    "factor": Mistake(
        "GW801",
        "The gradient is a constant times the right one: a factor of the derivative was lost, or came in twice.",
        "Derive the line that is named again, and look for a 2 of a square, a 1/n of a mean, or a scale.",
    ),
    "sign": Mistake(
        "GW802",
        "The gradient, or one of its terms, has the wrong sign.",
        "Check the differences and negations on the line: d(a - b) is +1 for a and -1 for b.",
    ),
    "bias_mean": Mistake(
        "GW803",
        "The gradient of a vector, such as a bias, is averaged over the batch where the chain rule adds it up.",
        "Take `grad_output.sum(0)`: a mean over the batch belongs to the loss, which has divided already.",
    ),
    "missing_term": Mistake(
        "GW804",
        "A term of the derivative is missing: the gradient is right for a part of the formula only.",
        "A product has a term for each factor, and a value that is used twice has one for each use.",
    ),
    "transposed": Mistake(
        "GW805",
        "The gradient of a matrix is that of its transpose. The shapes agree only because the matrix is square.",
        "For `y = x @ w.T`, the gradient of `w` is `grad_output.T @ x`. Test with a matrix that is not square.",
    ),
    "wrong_saved": Mistake(
        "GW806",
        "The backward reads another tensor than its formula needs, such as the output instead of the input.",
        "Compare `save_for_backward` with the order in which `saved_tensors` is unpacked.",
    ),
    "missing_grad": Mistake(
        "GW807",
        "An input or a parameter that the loss depends on gets no gradient, or zeros.",
        "Return a gradient for it instead of None, and keep it in the graph.",
    ),
    "no_grad_output": Mistake(
        "GW808",
        "The backward ignores the gradient that comes in. It is right only at the end of the graph, where that is 1.",
        "Multiply the local derivative by `grad_output`.",
    ),
    "broadcast": Mistake(
        "GW809",
        "An input was broadcast, and its gradient is reduced over the wrong axes to the right shape.",
        "Sum the gradient over exactly the axes that were broadcast; `Tensor.sum_to_size` does it.",
    ),
    "batch": Mistake(
        "GW810",
        "The gradient is right for one sample and wrong for several.",
        "Look for a mean instead of a sum, an index of the first sample, or a reshape that mixes samples.",
    ),
    "negative": Mistake(
        "GW811",
        "The gradient is wrong for negative inputs only.",
        "Check the mask or the branch for them: a leaky slope, an absolute value, a clamp.",
    ),
    "channel": Mistake(
        "GW812",
        "The gradient is wrong in one channel or one row only.",
        "Look for an assignment to a part of the gradient, or for a loop that ends too early.",
    ),
    "eps": Mistake(
        "GW813",
        "The backward takes its epsilon at another place than the forward, which shows for small inputs.",
        "Use the same expression in both, such as `sqrt(var + eps)`.",
    ),
    "inner_product": Mistake(
        "GW814",
        "A normalization misses the term that its sum adds: softmax needs `(grad_output * y).sum()`.",
        "Subtract the inner product of the incoming gradient and the output.",
    ),
    "layout": Mistake(
        "GW815",
        "The gradient is wrong for tensors that are not contiguous, such as a transposed view.",
        "Call `contiguous()` before memory is read in its order, or use `reshape` instead of `view` and `as_strided`.",
    ),
    "inplace": Mistake(
        "GW816",
        "A tensor that the backward reads was changed in place after the forward pass, unseen by autograd.",
        "Save a copy, or write into a new tensor. `save_for_backward` lets autograd notice such writes.",
    ),
    "stale": Mistake(
        "GW817",
        "The backward reads a value of an earlier call, such as a buffer that the forward no longer updates.",
        "Save what this call has computed on `ctx`, not on the module.",
    ),
    "lr_scale": Mistake(
        "GW818",
        "The gradient is scaled by the learning rate, so the optimizer applies the rate twice.",
        "Leave the rate to the optimizer.",
    ),
    "double_count": Mistake(
        "GW819",
        "The gradient of a shared weight counts one of its uses twice.",
        "Add the gradients of tied weights once, or let autograd do it.",
    ),
    "temperature": Mistake(
        "GW820",
        "The factor that a temperature adds to the derivative is missing.",
        "Divide the gradient by the temperature that divides the input.",
    ),
    "hook": Mistake(
        "GW821",
        "A hook changes the gradient on its way.",
        "Remove the hook, or allow it by its name if it is meant: `--allow NAME`.",
    ),
    "detach": Mistake(
        "GW822",
        "A value leaves the graph inside of a formula, by `detach()`, `.data`, `.item()` or `no_grad`: a term is lost.",
        "Keep the value in the graph, or allow the place by its name if it is meant: `--allow NAME`.",
    ),
    "accumulation": Mistake(
        "GW823",
        "The gradient is that of one micro-batch times their number: the losses were not divided.",
        "Divide the loss of each micro-batch by their number before `backward()`.",
    ),
    "token_mean": Mistake(
        "GW824",
        "The mean of the means of the micro-batches replaces the mean over all tokens, although their counts differ.",
        "Divide the sum of each micro-batch by the number of tokens in all of them.",
    ),
    "skipped-solve": Mistake(
        "GW831",
        "The backward of a fixed point differentiates its last iteration only, and skips the adjoint equation.",
        "Solve `w = v + J^T w` in the backward pass, in a Function or in a hook of the output.",
    ),
    "early-stop": Mistake(
        "GW832",
        "The backward of a fixed point stops the adjoint solve before it has converged.",
        "Iterate until the residual is small next to the gradient.",
    ),
    "solve-sign": Mistake(
        "GW833",
        "The adjoint equation of a fixed point has the Jacobian with the wrong sign.",
        "The matrix is `I - J^T` for `z = f(z)`.",
    ),
}
"""By kind, mistakes in gradients."""

IN_STEPS = {
    "loss-not-divided": Mistake(
        "GW901",
        "The losses of the micro-batches are added and not divided, so the gradient is too large by their number.",
        "Divide each loss by the number of micro-batches.",
    ),
    "wrong-divisor": Mistake(
        "GW902",
        "The losses are divided by another number than that of the micro-batches of this window, such as the last one.",
        "Divide by the number of micro-batches that the window really has.",
    ),
    "decay-twice": Mistake(
        "GW903",
        "Weight decay is applied by the loss or the gradient, and again by the optimizer.",
        "Keep one of them; AdamW has decoupled decay.",
    ),
    "gradient-dropped": Mistake(
        "GW904",
        "A part of the loss does not reach the parameters it depends on.",
        "Look for `detach()`, `.item()`, `.data` or `no_grad` between them.",
    ),
    "zero-grad-missing": Mistake(
        "GW905",
        "Gradients of the step before are still there, and the new ones are added to them.",
        "Call `optimizer.zero_grad()` once per update.",
    ),
    "zeroed-before-update": Mistake(
        "GW906",
        "The gradients are cleared between the backward pass and the update.",
        "Clear them after `optimizer.step()`, or before the backward pass.",
    ),
    "zeroed-between-micro-batches": Mistake(
        "GW907",
        "The gradients are cleared between micro-batches, so only the last one counts.",
        "Clear them once per update.",
    ),
    "mean-of-means": Mistake(
        "GW908",
        "Micro-batches with unequal numbers of samples or tokens count the same.",
        "Divide the sum of each by the number of all of them.",
    ),
    "not-unscaled": Mistake(
        "GW909",
        "The gradients still carry the loss scale in the update.",
        "Update by `scaler.step(optimizer)`.",
    ),
    "unscaled-early": Mistake(
        "GW910",
        "The gradients are unscaled before the last micro-batch has added its scaled ones.",
        "Call `scaler.unscale_(optimizer)` once, after the last backward pass.",
    ),
    "unscaled-twice": Mistake(
        "GW911",
        "The gradients are divided by the loss scale twice.",
        "Unscale once per update; `scaler.step` does it if you did not.",
    ),
    "clip-before-unscale": Mistake(
        "GW912",
        "The gradients are clipped while they carry the loss scale, so the limit means another norm.",
        "Call `scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
    ),
    "clip-before-the-sum": Mistake(
        "GW913",
        "The gradients are clipped before all micro-batches have been added.",
        "Clip once, right before the update.",
    ),
    "clip-after-update": Mistake(
        "GW914",
        "The gradients are clipped after the update, which has no effect.",
        "Clip before `optimizer.step()`.",
    ),
    "clip-of-wrong-parameters": Mistake(
        "GW915",
        "Other parameters are clipped than those that are updated.",
        "Pass the parameters of the optimizer to `clip_grad_norm_`.",
    ),
    "update-before-backward": Mistake(
        "GW916",
        "The update comes before the backward pass, so it uses the gradients of the step before.",
        "Call `loss.backward()` first.",
    ),
    "updated-twice": Mistake(
        "GW917",
        "The optimizer makes two updates from the same gradients.",
        "Call `optimizer.step()` once per window, and not `scaler.step` as well.",
    ),
    "update-skipped": Mistake(
        "GW918",
        "The optimizer makes no update in this step, though its gradients are finite.",
        "Look for a condition around `optimizer.step()` that is never true.",
    ),
    "stale-parameters": Mistake(
        "GW919",
        "The optimizer holds parameters that the model no longer uses.",
        "Make the optimizer after the last change of the parameters, such as a move or a new head.",
    ),
    "not-in-a-group": Mistake(
        "GW920",
        "A trainable parameter is in no group of an optimizer.",
        "Add it to a group, or set `requires_grad_(False)` if it should stay frozen.",
    ),
    "frozen": Mistake(
        "GW921",
        "A parameter of the optimizer cannot move: it requires no gradient, or its rate is 0.",
        "Set `requires_grad_(True)` or a rate, or leave it out of the optimizer.",
    ),
    "not-the-formula": Mistake(
        "GW922",
        "The update is not what the formula of the optimizer gives for this gradient and this state.",
        "Look for hooks of the optimizer, changed states and parameters that are written by hand.",
    ),
    "update-undone": Mistake(
        "GW923",
        "The new values are replaced after the update.",
        "Look for code that loads, copies or resets parameters at the end of the step.",
    ),
    "update-lost": Mistake(
        "GW924",
        "The updates are smaller than the spacing of the format of the weights, so they change nothing.",
        "Keep the weights in float32, for instance under autocast.",
    ),
    "schedule-before-update": Mistake(
        "GW925",
        "The schedule moves before the update, so the first rate is never used.",
        "Call `scheduler.step()` after `optimizer.step()`.",
    ),
    "scheduled-twice": Mistake(
        "GW926",
        "The schedule moves twice for one update.",
        "Call `scheduler.step()` once, also where a library calls it for you.",
    ),
}
"""By kind, mistakes in a training step."""

MISTAKES = IN_GRADIENTS | IN_STEPS


def code_of(kind: str) -> str | None:
    """Return the code of a kind, or None if it has none."""
    mistake = MISTAKES.get(kind)
    return mistake.code if mistake else None


def shown_code(kind: str) -> str:
    """Return the code of a kind as it follows a sentence, or an empty string if it has none."""
    code = code_of(kind)
    return f" ({code})" if code else ""


def page_of(name: str) -> str | None:
    """Return the page of a mistake, named by its kind or its code, or None if there is no such mistake."""
    asked = _folded(name)
    for kind, mistake in MISTAKES.items():
        if asked in (_folded(kind), _folded(mistake.code)):
            return f"{mistake.code}  {kind}\n\n{mistake.meaning}\n\n{mistake.remedy}\n"
    return None


def _folded(name: str) -> str:
    return name.casefold().replace("_", "-")
