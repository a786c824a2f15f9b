"""A mistake in a config is one message, without a traceback, with the way out, and leaves no run."""

import pytest
from end_to_end.bad_input.commands import CONFIG, line_of, settings

MISTAKES = {
    "unknown key": (
        ["optm.lr=1"],
        "optm: unknown setting, expected one of run, model, data, loss, optim, schedule, train, watch, detect, sinks\n"
        " --> command line\n"
        "  |\n"
        "  | --set optm.lr=1\n"
        "  |       ^^^^\n"
        "  = help: did you mean 'optim'?\n",
    ),
    "wrong type": (
        ["train.steps=many"],
        "train.steps: got 'many', expected a whole number of at least 1, or null\n"
        " --> command line\n"
        "  |\n"
        "  | --set train.steps=many\n"
        "  |                   ^^^^\n",
    ),
    "misspelt model": (
        ["model.name=mpl"],
        "model.name: got 'mpl', expected one of cnn, gpt, mlp, or a classification model of torchvision "
        "(`gradwatch list models` shows all)\n"
        " --> command line\n"
        "  |\n"
        "  | --set model.name=mpl\n"
        "  |                  ^^^\n"
        "  = help: did you mean 'mlp'?\n",
    ),
    "missing data file": (["data={name: csv, file: gone.csv}"], "data.file: no file {folder}/gone.csv, expected a CSV"),
    "damaged data file": (["data={name: npz, file: noise.npz}"], "data.file: noise.npz is not a NumPy .npz; write one"),
    "no data there": (
        ["data={name: MNIST, root: gone}"],
        "data.root: MNIST was not found in {folder}/gone (Dataset not found. You can use download=True to download it)"
        "; put its files there, or let data.download: true fetch them",
    ),
    "table without rows": (
        ["data={name: csv, file: header.csv}"],
        "data.file: header.csv holds no row of data, expected at least one sample",
    ),
    "empty dataset": (
        ["data={target: 'mine:empty'}"],
        "data.target: the training part is empty, expected at least one sample",
    ),
    "batch larger than the data": (
        ["data.batch_size=2000", "data.drop_last=true"],
        "data.batch_size: got 2000 for 1438 samples, and data.drop_last leaves out a batch that is not full: none "
        "would be left; expected at most 1438, or drop_last: false",
    ),
    "module that is not there": (
        ["model={target: 'gone.away:model'}"],
        "model.target: 'gone.away:model' does not import: No module named 'gone'; expected package.module:factory, on "
        "the Python path or below the folder that gradwatch runs in",
    ),
    "module that needs another": (
        ["model={target: 'needing:model'}"],
        "model.target: 'needing:model' does not import: ModuleNotFoundError: No module named 'surely_not_installed' "
        "(needing.py, line 1, in <module>)",
    ),
    "module with a syntax error": (
        ["model={target: 'broken:model'}"],
        "model.target: 'broken:model' does not import: SyntaxError: '(' was never closed (broken.py, line 1)",
    ),
    "module that raises": (
        ["model={target: 'failing:model'}"],
        "model.target: 'failing:model' does not import: OSError: no licence (failing.py, line 1, in <module>)",
    ),
    "misspelt attribute": (
        ["model={target: 'mine:Buggi'}"],
        "model.target: module 'mine' has no 'Buggi'; did you mean 'Buggy'?",
    ),
    "attribute that cannot be called": (
        ["model={target: 'mine:constant'}"],
        "model.target: 'mine:constant' is a int, expected a function or a class",
    ),
    "target that returns no module": (
        ["model={target: 'mine:number'}"],
        "model.target: 'mine:number' returned a int, expected a nn.Module",
    ),
    "target that raises": (
        ["model={target: 'mine:failing'}"],
        f"model.target: 'mine:failing' raised KeyError: 'k' (mine.py, line {line_of('{}[')}, in failing)",
    ),
    "target with other keywords": (
        ["model={target: 'mine:Linear', strid: 2}"],
        "model.target: 'mine:Linear' does not accept these settings: got an unexpected keyword argument 'strid'",
    ),
    "data target that raises": (
        ["data={target: 'mine:failing'}"],
        "data.target: 'mine:failing' raised KeyError: 'k' (",
    ),
    "model without anything to train": (
        ["model={target: 'mine:Frozen'}"],
        "model: 'mine:Frozen' has no parameter to train: each has requires_grad=False",
    ),
    "model that returns a tuple": (
        ["model={target: 'mine:Pair'}"],
        "model: returned a tuple of 2, expected one tensor for CrossEntropyLoss; return the logits alone, or give a "
        "loss that takes this output (loss.target: package.module:name)",
    ),
    "loss per sample": (
        ["loss={target: 'mine:per_sample'}"],
        "loss: returned a tensor of shape (64,), expected a scalar; use reduction: mean, or return loss.mean()",
    ),
    "loss that is no tensor": (
        ["loss={target: 'mine:plain'}"],
        "loss: returned a float, expected a tensor of one number",
    ),
    "loss that is cut off": (
        ["loss={target: 'mine:detached'}"],
        "loss: it does not depend on any parameter, so there is no gradient to take; look for detach(), "
        "item(), no_grad() or "
        "a new tensor between the model's parameters and the loss",
    ),
    "loss of other arguments": (
        ["loss={target: 'mine:alone'}"],
        "loss.target: 'mine:alone' is called with the model's outputs and the targets: too many positional arguments",
    ),
    "fewer outputs than classes": (
        ["model={target: 'mine:Linear', outputs: 3}"],
        "loss: the labels of a batch run from 0 to 9, but the model has 3 outputs, expected labels from 0 to 2; give "
        "the model as many outputs as there are classes, or fix the labels",
    ),
    "class weights of another number": (
        ["loss={name: CrossEntropyLoss, weight: [1, 2]}"],
        "loss: CrossEntropyLoss cannot take outputs of shape (64, 10) and targets of shape (64,) and type torch.int64",
    ),
    "values against labels": (
        ["loss={name: MSELoss}"],
        "loss: MSELoss got outputs of shape (64, 10) and targets of shape (64,), expected equal shapes; broadcasting "
        "would compare every output with every target",
    ),
    "gpt on images": (
        ["model={name: gpt}"],
        "model: gpt takes tokens, but the data has classes; use mlp or cnn, or data: text",
    ),
    "mlp on text": (
        ["data={name: text}"],
        "model: mlp takes classes or values, but the data has a label per position; use gpt",
    ),
    "cnn on a table": (
        ["model={name: cnn}", "data={name: synthetic}"],
        "model: cnn takes images of shape (channels, height, width), but a sample has shape (20,); use mlp, or give "
        "the data that shape",
    ),
    "colour model on grey images": (
        ["model={name: resnet18}"],
        "model: resnet18 takes images of 3 channels, but a sample has 1; add {{Grayscale: {{num_output_channels: 3}}}} "
        "to data.transform",
    ),
    "images too small for a torchvision model": (
        ["model={name: alexnet}", "data.transform=[{Grayscale: {num_output_channels: 3}}]"],
        "model: AlexNet cannot take inputs of shape (64, 3, 8, 8) and type torch.float32: ",
    ),
    "batch of one with BatchNorm": (
        ["model.normalization=batch", "data.batch_size=1"],
        "model: its BatchNorm cannot normalize one sample, and a batch came with inputs of shape (1, 1, 8, 8) and type "
        "torch.float32; set data.drop_last: true, or another data.batch_size",
    ),
    "schedule that ends before the run": (
        ["optim.lr=1", "schedule={name: one_cycle, max_lr: 1, total_steps: 2}"],
        "schedule.total_steps: OneCycleLR ends after 2 of the 4 times that it is asked for a learning rate; leave it "
        "out to have it fit",
    ),
    "optimizer that refuses": (
        ["optim.lr=-1"],
        "optim: AdamW does not accept these settings: Invalid learning rate: -1.0",
    ),
    "device that does not exist": (
        ["train.device=gpu"],
        "train.device: got 'gpu', expected auto, cpu, cuda, cuda:1, mps or xpu\n"
        " --> command line\n"
        "  |\n"
        "  | --set train.device=gpu\n"
        "  |                    ^^^\n",
    ),
    "device that is not here": (["train.device=cuda:77"], "train.device: 'cuda:77' cannot be used here: "),
    "compiler that is not there": (["train.compile={backend: gone}"], "train.compile: Invalid backend: 'gone'."),
    "folder that cannot be made": (
        ["run.out=base.yaml/runs"],
        "run.out: cannot create base.yaml/runs/",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message_that_says_the_way_out_and_leaves_no_run(train, folder, overrides, message):
    code, out, err = train("base.yaml", *settings(*overrides))

    assert err.startswith(f"error: {message.format(folder=folder)}"), err
    assert err.count("\n") == max(message.count("\n"), 1), "one message, without traceback"
    assert code == 2
    assert {line.split()[0] for line in out.splitlines()} <= {"run", "model", "data", "length"}, "only the start header"
    assert not list(folder.glob("runs/*")), "a run without a step is not kept"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "other.yaml: there is no such file"),
        ("", "other.yaml"),
        ("- a\n- b\n", "other.yaml"),
        ("a: &x [1\n", "other.yaml: is not YAML: "),
        ("train: {steps: 1, steps: 2}\n", "other.yaml"),
        ("train:\n\tsteps: 1\n", "other.yaml: is not YAML: "),
    ],
)
def test_a_config_that_is_no_yaml_mapping_is_a_mistake_with_its_file(train, folder, text, message):
    if text is not None:
        (folder / "other.yaml").write_text(text)

    code, out, err = train("other.yaml")

    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_anchors_and_merges_of_yaml_are_understood(train, folder):
    (folder / "other.yaml").write_text(CONFIG.replace("{name: mlp,", "&m {name: mlp,") + "detect: {}\n")

    assert train("other.yaml")[0] == 0


def test_a_batch_larger_than_the_data_is_the_whole_data(train):
    code, _, err = train("base.yaml", *settings("data.batch_size=2000"))

    assert (code, err) == (0, "")
