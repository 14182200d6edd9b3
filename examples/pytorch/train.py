# SPDX-License-Identifier: MIT
"""Trains with DistributedDataParallel and layer dropping:

    torchrun --nproc-per-node 2 examples/pytorch/train.py --drop-ratio 0.9

On images that the program draws, or on CIFAR-10 where torchvision is installed and --data names its folder. Without
--drop-ratio it is plain DDP, to compare with. On GPUs where there are any.

--compare trains three models in one run, of drawn images of which each rank sees its own classes only: one rank by itself, which cannot learn
the others, DDP, and layer dropping. --picture draws their accuracy over the bytes.
"""

import argparse
import gc
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lamina.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--drop-ratio", type=float, help="the share of the elements to drop in a step; none: DDP alone")
parser.add_argument("--fragment-elements", type=int, default=4096, help="larger layers are decided in fragments: this model is small")
parser.add_argument("--warm-up", type=int, default=20, help="steps in which the drop ratio grows")
parser.add_argument("--overlap", action="store_true", help="plan the selection before the step, and send while backward computes")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--batch", type=int, default=32, help="images of a rank in a micro-batch")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
parser.add_argument("--learning-rate", type=float, default=0.03)
parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; layers that are dropped learn worse with it")
parser.add_argument("--amp", action="store_true", help="float16 with loss scaling on a GPU, bfloat16 on the CPU")
parser.add_argument("--model", choices=["small", "resnet18", "resnet50"], default="small", help="the last two need torchvision")
parser.add_argument("--data", metavar="DIR", help="CIFAR-10 as torchvision keeps it")
parser.add_argument("--checkpoint", metavar="DIR", help="save there, a file a rank, and go on from what is there")
parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
parser.add_argument("--tensorboard", metavar="DIR")
parser.add_argument("--compare", action="store_true")
parser.add_argument("--picture", metavar="FILE", help="with --compare; needs matplotlib")


def make_model(name):
    torch.manual_seed(0)
    if name != "small":
        import torchvision
        return getattr(torchvision.models, name)(num_classes=10)

    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(),
                         nn.Linear(64, 10))


def drawn(index, size, classes=10, first=0, apart=1):
    """Noise with a wave whose direction and length tell the class."""
    generator = torch.Generator().manual_seed(index)
    labels = first + apart * torch.randint(classes, (size,), generator=generator)
    angle = labels * torch.pi / 10
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    wave = torch.sin(x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1))
    return torch.randn(size, 3, 32, 32, generator=generator) * 2 + wave.unsqueeze(1), labels


def make_batches(given, rank, world):
    """A function from a number to a batch, and the batches to test on."""
    if given.data is None:
        return lambda index: drawn(1 + index * world + rank, given.batch), [drawn(-1 - index, 250) for index in range(2)]
    from torchvision import datasets, transforms
    to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.25)])
    train, test = (datasets.CIFAR10(given.data, train=which, transform=to_tensor) for which in (True, False))

    def batch(index):
        chosen = torch.randint(len(train), (given.batch,), generator=torch.Generator().manual_seed(1 + index * world + rank))
        images, labels = zip(*(train[i] for i in chosen.tolist()))
        return torch.stack(images), torch.tensor(labels)
    return batch, torch.utils.data.DataLoader(test, 250)


def save(directory, parts, step):
    """A file a rank: of the residual each has its own, the only copy of what was not sent."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    mine = f"rank{dist.get_rank()}-"
    unfinished = directory / f"{mine}unfinished"
    torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
    unfinished.rename(directory / f"{mine}{step}.pt")
    dist.barrier()  # now all ranks have this step, and the one before can go
    for old in directory.glob(f"{mine}*.pt"):
        if old.name != f"{mine}{step}.pt":
            old.unlink()


def load(directory, parts, device):
    """The last step that all ranks have saved; 0 if there is none."""
    mine = f"rank{dist.get_rank()}-"
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {int(file.stem[len(mine):]) for file in pathlib.Path(directory).glob(f"{mine}*.pt")})
    step = max(set.intersection(*everyones), default=0)
    if step:
        saved = torch.load(pathlib.Path(directory) / f"{mine}{step}.pt", map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    return step


def accuracy(model, tests, device):
    """In percent."""
    model.eval()
    with torch.no_grad():
        right = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in tests)
    model.train()
    return 100 * right / sum(len(labels) for _, labels in tests)


def compare(given, device, rank, world):
    """Trains one model after the other, on the same batches. Rank 0 says what each has reached, and what it has sent."""
    tests, curves = [drawn(-1 - index, 250) for index in range(2)], {}
    for name in ("one rank", "DDP", "lamina"):
        model = make_model(given.model).to(device)
        ddp = model if name == "one rank" else DDP(model)
        optimizer, sent = torch.optim.SGD(ddp.parameters(), given.learning_rate, momentum=given.momentum), 0
        state = lamina.torch.register(ddp, drop_ratio=0.95 if given.drop_ratio is None else given.drop_ratio, warm_up_steps=given.warm_up,
                                      fragment_elements=given.fragment_elements) if name == "lamina" else None
        curves[name] = [(0.0, accuracy(model, tests, device))]
        for step in range(given.steps):
            images, labels = drawn(1 + step * world + rank, given.batch, len(range(rank, 10, world)), rank, world)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            sent += 0 if name == "one rank" else state.last.sent_bytes if state else sum(4 * each.numel() for each in model.parameters())
            if rank == 0 and (step % 10 == 9 or step + 1 == given.steps):
                curves[name].append((sent / 1e6, accuracy(model, tests, device)))
        if rank == 0:
            print(f"{name}: accuracy {curves[name][-1][1]:.1f} %, {sent / 1e6:.2f} MB sent by each rank", flush=True)
        dist.barrier()
        del ddp, state
        gc.collect()
    if rank == 0 and given.picture:
        from matplotlib import pyplot
        for (name, curve), marker in zip(curves.items(), "so^"):
            pyplot.plot(*zip(*curve), marker=marker, label=name)
        pyplot.xscale("symlog", linthresh=1)
        pyplot.xlim(left=0)
        pyplot.xlabel("MB sent by each rank")
        pyplot.ylabel("accuracy on all classes, %")
        pyplot.legend()
        pyplot.savefig(given.picture)


def main():
    given = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if given.compare:
        compare(given, device, rank, world)
        dist.destroy_process_group()
        return
    batch, tests = make_batches(given, rank, world)
    model = make_model(given.model).to(device)
    ddp = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), given.learning_rate, momentum=given.momentum)
    # Since PyTorch 2.3 torch.amp has it.
    scaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)(enabled=given.amp and device.type == "cuda")
    state = None
    if given.drop_ratio is not None:
        state = lamina.torch.register(ddp, drop_ratio=given.drop_ratio, fragment_elements=given.fragment_elements,
                                      warm_up_steps=given.warm_up, overlap=given.overlap, scaler=scaler)

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, **({} if state is None else {"dropping": state})}
    first = load(given.checkpoint, parts, device) if given.checkpoint else 0
    writer = None
    if given.tensorboard and rank == 0:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(given.tensorboard)
    loss = torch.tensor(float("nan"))
    for step in range(first, given.steps):
        optimizer.zero_grad()
        for micro in range(given.accumulate):
            images, labels = (each.to(device) for each in batch(step * given.accumulate + micro))
            ddp.require_backward_grad_sync = micro + 1 == given.accumulate  # what DDP's no_sync() sets
            with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16, enabled=given.amp):
                loss = nn.functional.cross_entropy(ddp(images), labels) / given.accumulate
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if given.checkpoint and ((step + 1) % given.checkpoint_every == 0 or step + 1 == given.steps):
            save(given.checkpoint, parts, step + 1)
        if writer and state is not None:
            state.add_scalars(writer, step)
        if rank == 0 and (step + 1) % 20 == 0:
            sent = f", {100 * state.totals.ratio:5.1f} % of the bytes" if state is not None else ""
            print(f"step {step + 1:4}: loss {loss.item() * given.accumulate:.3f}{sent}", flush=True)

    if rank == 0:
        share = f"{100 * state.totals.ratio:.1f} % of DDP's bytes" if state is not None else "all of DDP's bytes"
        print(f"after {given.steps} steps on {world} ranks: loss {loss.item() * given.accumulate:.3f}, "
              f"accuracy {accuracy(model, tests, device):.1f} %, {share}")
    dist.barrier()
    del ddp  # before the group: destroyed with it, DDP waits for threads of gloo that wait for this one
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
