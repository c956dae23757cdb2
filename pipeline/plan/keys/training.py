"""The tables `run`, `model`, `data`, `optimizer`, `lr_scheduler` and `evaluation`: what a run trains, on which data.

The docstrings of the tables are published in docs/plan.schema.json.
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from .key_types import (
    Accepts,
    Autocast,
    Cut,
    Decay,
    EvaluationEvery,
    Every,
    FactorySection,
    Folder,
    Groups,
    Name,
    Options,
    Positive,
    Reference,
    Section,
    Size,
    Target,
    Truth,
    Unset,
    WeightsPath,
    one_of,
    whole,
)
from .stages import MOST_STAGES

Balance = Literal["parameters", "time"]


class RunPlan(Section):
    """The length of the run, and the place of its files.

    Exactly one of `steps` and `epochs` is given, but neither in a scripted run: the script decides.
    """

    name: Name = Field(
        default="run",
        description="Names the run in reports and its folder in `run.dir`. Default: the plan's folder.",
        examples=["digits"],
    )
    seed: Annotated[int, whole(0)] = Field(
        default=0,
        description="Seeds the model's weights, the order of the data and every layer's random numbers.",
        examples=[40],
    )
    steps: Unset[Annotated[int, whole(1)]] = Field(
        default=None, description="How many steps to train; one step is one batch.", examples=[1000]
    )
    epochs: Unset[Annotated[int, whole(1)]] = Field(
        default=None, description="How many passes over the data to train.", examples=[20]
    )
    dir: Folder = Field(
        default=Path("runs"),
        description="Where the run's folder is made, relative to where the command runs.",
        examples=["/data/runs"],
    )
    log_every: Annotated[int, whole(1)] = Field(
        default=10, description="The loss of every so many steps is kept in the results.", examples=[100]
    )


class ModelPlan(Section):
    """The model and its cut. `stages` is None until the model is loaded, if only the model can tell."""

    factory: Reference = Field(
        description="Is called with `options` and returns the model; or a list of modules: the stages.",
        examples=["model.py:build"],
    )
    options: Options = Field(
        default_factory=dict, description="Keyword arguments for the factory.", examples=[{"width": 128}]
    )
    weights: Unset[WeightsPath] = Field(
        default=None,
        description="The file or folder that each worker reads the weights of its stages from. Default: the factory's.",
        examples=["/data/model", "model.safetensors"],
    )
    cut: Unset[Cut] = Field(
        default=None,
        description='The layers with which stages 1, 2, ... begin, numbers or names; "auto" cuts into `stages` stages.',
        examples=[[2, 4], ["encoder.layer.6"]],
    )
    stages: Unset[Annotated[int, whole(1, MOST_STAGES)]] = Field(
        default=None, description='How many stages there are. Without `cut` it cuts as "auto" does.', examples=[4]
    )
    balance: Annotated[Balance, one_of(get_args(Balance))] = Field(
        default="parameters",
        description="What `stages` stages share evenly: parameters, or the time of a microbatch, which is measured "
        "when the run begins.",
        examples=["time"],
    )
    stage_memory: Unset[Size] = Field(
        default=None,
        description="What a stage may take at most, in bytes; `stages` stages are cut so that none takes more.",
        examples=["2GiB"],
    )
    trainable: Unset[
        Annotated[
            tuple[Annotated[str, Field(strict=True, min_length=1)], ...],
            Field(min_length=1),
            Accepts('a list of patterns such as ["encoder.layer.40.*"]'),
        ]
    ] = Field(
        default=None,
        description="Patterns of the names of parameters that are trained; all others are frozen. Default: those that "
        "require a gradient as the factory returns them.",
        examples=[["encoder.layer.40.*", "head.*"]],
    )
    prefix_cache: Unset[Truth] = Field(
        default=None,
        description="Whether what leaves the frozen first stages in the first epoch is kept on the disk and used in "
        "all later ones, in which those stages do not run. Default: false.",
        examples=[True],
    )
    loss: Reference = Field(
        description="A function of (outputs, targets), or a module class: the mean over the rows.",
        examples=["torch.nn.functional.cross_entropy"],
    )
    autocast: Unset[Autocast] = Field(
        default=None,
        description="The precision in which torch.autocast computes forwards and the loss. Default: the weights' own.",
        examples=["bf16"],
    )
    accept_difference: Unset[Truth] = Field(
        default=None,
        description="Whether a traced model is trained though its graphs were found to compute something other than "
        "its forward. Default: false.",
        examples=[True],
    )
    metrics: Annotated[tuple[Reference, ...], Accepts('a list such as ["metrics.py:accuracy"]')] = Field(
        default=(),
        description="Functions of (outputs, targets) that measure the rows held out, when they are evaluated.",
        examples=[["model.py:accuracy"]],
    )


class EvaluationPlan(Section):
    """Evaluation of the held-out rows: its times, the value that evaluations are compared by, and early stopping."""

    every: Unset[EvaluationEvery] = Field(
        default=None,
        description="After how many steps the rows held out are evaluated, besides after the last step. Default: only "
        "after the last.",
        examples=[100, "epoch"],
    )
    metric: Annotated[str, Field(strict=True, min_length=1), Accepts('"loss" or the name of a metric')] = Field(
        default="loss",
        description='What evaluations are compared by: "loss", or the name of one of `model.metrics`.',
        examples=["accuracy"],
    )
    better: Unset[Annotated[Literal["lower", "higher"], one_of(("lower", "higher"))]] = Field(
        default=None,
        description='Which of two values of the metric is better. Default: "lower" of the loss; another metric needs '
        "it.",
        examples=["higher"],
    )
    patience: Unset[Annotated[int, whole(1)]] = Field(
        default=None,
        description="After how many evaluations in a row that were not better the run ends early. Default: it never "
        "does.",
        examples=[5],
    )
    keep_best: Truth = Field(
        default=False,
        description="Whether a checkpoint is written at each evaluation, and that of the best one is kept.",
        examples=[True],
    )


class OptimizerPlan(FactorySection):
    """`factory` is called with a stage's parameters and the keys that are not named here."""

    factory: Reference = Field(
        description="Is called with a stage's parameters, once for each stage that has any.",
        examples=["torch.optim.AdamW"],
    )
    clip_norm: Unset[Positive] = Field(
        default=None,
        description="What the norm of all stages' gradients may be at most; before each update they are scaled down to "
        "it, as torch.nn.utils.clip_grad_norm_ does.",
        examples=[1.0],
    )
    ema_decay: Unset[Decay] = Field(
        default=None,
        description="Each update is followed by one of an exponential moving average of the weights, as torch's "
        "AveragedModel does; this is its decay. Metrics measure the averages. Default: no averages.",
        examples=[0.999],
    )
    groups: Unset[Groups] = Field(
        default=None,
        description="Settings of the optimizer for parameters by their names in the model. The first group that "
        "matches a name counts; other parameters have the settings of this table.",
        examples=[[{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}]],
    )


class LrSchedulerPlan(FactorySection):
    """`factory` is called with a stage's optimizer and the keys that are not named here."""

    factory: Reference = Field(
        description="Is called with a stage's optimizer.", examples=["torch.optim.lr_scheduler.StepLR"]
    )
    every: Every = Field(
        default="step",
        description="When it steps: after each step, after the last step of each epoch, after each evaluation, by its "
        "value, or after so many steps.",
        examples=["epoch"],
    )


class DataPlan(Section):
    """Origin of the batches: exactly one of `source` and `dataset`. All keys after these two belong to `dataset`."""

    source: Unset[Reference] = Field(
        default=None,
        description="Is called with `batch_size`, `seed` and `options` and returns a source, such as stageline.Rows.",
        examples=["data.py:batches"],
    )
    dataset: Unset[Reference] = Field(
        default=None,
        description="A map-style torch Dataset, or what returns one when it is called with `options`.",
        examples=["data.py:train"],
    )
    held_out: Unset[Reference] = Field(
        default=None,
        description="The dataset whose rows are evaluated; given as `dataset` is.",
        examples=["data.py:test"],
    )
    target: Unset[Target] = Field(
        default=None,
        description="The name or place of the part of a sample that is its target, a list of them, or a function that "
        "takes a batch and returns (inputs, targets). Default: samples are pairs.",
        examples=["label", "data.py:split"],
    )
    collate: Unset[Reference] = Field(
        default=None,
        description="Makes a batch of a list of samples. Default: torch's default_collate.",
        examples=["data.py:padded"],
    )
    shuffle: Unset[Truth] = Field(
        default=None,
        description="Whether each epoch has an order of its own. Default: true.",
        examples=[False],
    )
    drop_last: Unset[Truth] = Field(
        default=None,
        description="Whether the last batch of an epoch is left out if it is smaller. Default: false.",
        examples=[True],
    )
    num_workers: Unset[Annotated[int, whole(0)]] = Field(
        default=None,
        description="Processes that draw ahead, at the first stage and at the last. Default: 0, the workers draw "
        "themselves.",
        examples=[2],
    )
    targets: Unset[Reference] = Field(
        default=None,
        description="Is called as `source` is, by a worker that has the last stage and not the first. Of its batches "
        "the targets alone count. Default: that worker opens the data, too.",
        examples=["data.py:labels"],
    )
    stays: Unset[
        Annotated[
            tuple[Annotated[int, whole(0, MOST_STAGES - 1)], ...],
            Field(min_length=1),
            Accepts("a list of stages such as [0]"),
        ]
    ] = Field(
        default=None,
        description="Stages whose inputs and weights stay at one worker, that of stage 0. A plan that would have them "
        "elsewhere is refused.",
        examples=[[0], [0, 2]],
    )
    labels_stay: Unset[Truth] = Field(
        default=None,
        description="Whether the targets stay there too: the last stage is at that worker. With `stays`. Default: "
        "false.",
        examples=[True],
    )
    options: Options = Field(
        default_factory=dict,
        description="Keyword arguments for the source, or for the datasets.",
        examples=[{"folder": "/data/digits"}],
    )
    batch_size: Annotated[int, whole(1)] = Field(
        description="Rows in a batch; at least `schedule.microbatches`.", examples=[64]
    )
    check: Truth = Field(
        default=True,
        description="Before the run, two processes try the plan; where they draw or compute other values, it is "
        "refused.",
        examples=[False],
    )

    @property
    def origin(self) -> str:
        """Key and value that name the data, as a plan file has them: `data.source = "data.py:batches"`."""
        return f'data.source = "{self.source}"' if self.dataset is None else f'data.dataset = "{self.dataset}"'

    @property
    def origin_held_out(self) -> str:
        """Key and value that name the held-out rows, as a plan file has them: `data.held_out = "data.py:test"`."""
        return self.origin if self.held_out is None else f'data.held_out = "{self.held_out}"'
