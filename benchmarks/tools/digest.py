# SPDX-License-Identifier: MIT
"""What was measured as tables, a question each: plain text that is Markdown as well."""

import math

from suite import Benchmark, Results, variant, variant_title, widest

METHODS = {"lamina": "lamina, whole layers", "lamina_fragments": "lamina, fragments of 65,536", "top_k": "top-k",
           "one_pass_threshold": "last step's threshold, one pass (Ok-Topk)", "sampled_top_k": "top-k of a sample (DGC)", "random_k": "random-k", "block_sparse": "blocks of 256 (OmniReduce)",
           **{f"power_sgd_{rank}": f"PowerSGD, rank {rank}" for rank in (1, 2, 4, 8)},
           "lamina_int4": "everything in 4 bits (lamina's payload)", "fp8": "everything in 8 bits (FP8 E4M3)",
           "one_bit": "1-bit", "terngrad": "TernGrad", "adacomp": "AdaComp"}
MODELS = {"resnet50": ("ResNet-50", 25_557_032), "vgg16": ("VGG-16", 138_357_544), "bert_base": ("BERT-base", 109_482_240),
          "gpt2": ("GPT-2", 124_439_808), "1e9": ("1,000 layers of 10⁶", 1_000_000_000)}
SEARCHES = {"algorithm_1": "Algorithm 1, values known", "values_and_algorithm_1": "Algorithm 1 with a pass for the values",
            "sampled": "sample of 1 % (DGC)", "histogram": "histogram", "gaussian": "normal law (Gaussian-k)",
            "exponential": "exponential law (SIDCo)", "exact": "exact (nth_element)"}
RESNET50 = MODELS["resnet50"][1]
HARD_MODELS = {"161_of_eight_octaves": "161, whose scales range over eight octaves", "20_alike": "20 that are alike",
               "161_alike": "161 that are alike", "one_of_74_percent": "one of 74 % of the elements, and 26 small ones"}


def seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if value * factor >= 1 or unit == "ns":
            scaled = value * factor
            return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1))))}f} {unit}"
    raise AssertionError


def grid(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: list[str]) -> str:
        cells = [cell.ljust(width) if column == 0 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (width + 2) if column == 0 else "-" * (width + 1) + ":"
                          for column, width in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def threshold_search(measured: dict[str, Benchmark]) -> str:
    layers = sorted(int(name.partition("/")[2]) for name in measured if name.startswith("search/"))
    rows = []
    for count in layers:
        search, sort = (measured[f"{name}/{count}"].seconds() for name in ("search", "sort"))
        rows.append([f"{count:,}", seconds(search), f"{search / count * 1e9:.1f}", seconds(sort), f"{sort / search:.1f}"])
    return grid(["layers", "selection", "ns a layer", "sorting", "sorting / selection"], rows)


def element_threshold(measured: dict[str, Benchmark]) -> str:
    models = [model for model in MODELS if f"exact/{model}" in measured]
    rows = []
    for search, title in SEARCHES.items():
        row = [title]
        for model in models:
            each = measured[f"{search}/{model}"]
            kept = each.counters.get("kept_over_wanted")
            row.append(seconds(each.seconds()) + (f" ({kept:.2f})" if kept is not None else ""))
        rows.append(row)
    return grid(["5 % to be sent; in brackets kept / wanted", *(MODELS[model][0] for model in models)], rows)


def methods(measured: dict[str, Benchmark]) -> str:
    plain = measured["plain_add"].seconds()
    drawn, recorded = ({name.partition("/")[2]: each for name, each in measured.items() if name.startswith(f"quality_{of}/")}
                       for of in ("drawn", "recorded"))
    rows = [_method_row(title, measured[name], plain, [drawn, recorded], "")
            for name, title in (("plain_copy", "memcpy"), ("plain_add", "a += g"))]
    for share in sorted({name.partition("/")[2] for name in drawn if "/" in name}, key=float) + [""]:
        for name, title in METHODS.items():
            key = f"{name}/{share}" if share else name
            if key in drawn:
                rows.append(_method_row(f"{title}{f', {share} %' if share else ''}", measured["step/" + key], plain,
                                        [drawn, recorded], key))
    header = ["step of a worker, ResNet-50", "ns / element", "over a += g", "bytes touched / element"]
    for gradients, qualities in (("drawn", drawn), ("recorded", recorded)):
        for each in list(qualities.values())[:1]:
            header += [f"% of the bytes, {gradients}", "% with the places at their entropy", f"error after {each.counters['steps']:.0f} steps"]
    return grid(header, rows)


def _method_row(title: str, step: Benchmark, plain: float, qualities: list[dict[str, Benchmark]], key: str) -> list[str]:
    row = [title, f"{step.seconds() / RESNET50 * 1e9:.2f}", f"{step.seconds() / plain:.2f}",
           f"{step.counters['touched_bytes_per_element']:.1f}"]
    for quality in filter(None, qualities):
        counters = quality[key].counters if key in quality else None
        row += [f"{counters['sent_percent']:.2f}", f"{counters.get('entropy_percent', counters['sent_percent']):.2f}",
                f"{counters['relative_error']:.3f}"] if counters else ["", "", ""]
    return row


def codec(measured: dict[str, Benchmark]) -> str:
    rows = []
    for name in dict.fromkeys(name.rpartition("/")[0] for name in measured):
        row = [name.replace("_", " ").replace("/", ", ").replace("as is", "as they are")]
        for share in ("5", "100"):
            each = measured[f"{name}/{share}"]
            row += [f"{each.counters['frame_bytes'] / 1e6:.1f} MB", seconds(each.seconds()),
                    f"{each.seconds() / measured[f'copy/{share}'].seconds():.2f}"]
        rows.append(row)
    return grid(["frames of ResNet-50", "5 % sent", "time", "over copy", "all sent", "time", "over copy"], rows)


def bounded(measured: dict[str, Benchmark]) -> str:
    titles = {"order/tags": "order of sending, by magnitude", "order/no_tags": "order of sending, as they lie",
              "transfer/cut": "sender: header and check", "transfer/check_and_place": "receiver: check and place",
              "transfer/both_ends": "both", "copy_and_hash": "copying and hashing once"}
    once = measured["copy_and_hash"].seconds()
    rows = []
    for name, title in titles.items():
        each = measured[name]
        rows.append([title, f"{1e9 * each.seconds() / each.counters['packets']:.0f} ns",
                     f"{each.counters['data_bytes'] / each.seconds() / 1e9:.2f} GB/s", f"{each.seconds() / once:.2f}"])
    packets = grid(["ResNet-50 whole", "a packet", "rate", "over copying and hashing"], rows)
    kinds = ("plain", "complete", "a_tenth_lost")
    commits = grid(["commit", "commit()", "all arrived", "a tenth of the chunks lost"],
                   [[title, *(seconds(measured[f"commit/{kind}{suffix}"].seconds()) for kind in kinds)]
                    for title, suffix in (("as they are", ""), ("int8", "_int8"))])
    return packets + "\n\n" + commits


def server(measured: dict[str, Benchmark]) -> str:
    rows = []
    for workers in sorted(int(name.rpartition("/")[2]) for name in measured if name.startswith("dense_sum/")):
        dense, some, everything = (measured[f"{name}/{workers}"].seconds()
                                   for name in ("dense_sum", "aggregate/some", "aggregate/everything"))
        rows.append([str(workers), seconds(dense), seconds(some), f"{some / dense:.2f}", seconds(everything),
                     f"{everything / dense:.2f}"])
    return grid(["workers", "dense sum and SGD", "lamina, R = 0.95", "over dense", "lamina, all sent", "over dense"], rows)


def scaling(measured: dict[str, Benchmark]) -> str:
    rows = []
    for elements in sorted(int(name.partition("/")[2]) for name in measured if name.startswith("plain_add/")):
        plain = measured[f"plain_add/{elements}"].seconds()
        one, two = (measured[f"step/{elements}/threads:{threads}"].seconds() for threads in (1, 2))
        rows.append([f"{elements:,}", seconds(plain), seconds(one), f"{one / plain:.2f}", seconds(two), f"{one / two:.2f}"])
    for name in ("all_at_once", "one_by_one"):
        many = measured[f"many_layers/{name}"].seconds()
        plain = measured["plain_add/10000000"].seconds()
        rows.append([f"10,000,000 in 100,000 layers, {name.replace('_', ' ')}", seconds(plain), seconds(many),
                     f"{many / plain:.2f}", "", ""])
    return grid(["elements", "a += g", "step, 1 thread", "over a += g", "2 threads", "1 over 2"], rows)


def worker_step(results: Results) -> str:
    """The same benchmarks in each variant, as multiples of the plain addition there."""
    variants = {variant_title(variant(name)): measured for name, measured in results.items() if name.startswith("worker_step")}
    rows = []
    for name in sorted(set.intersection(*(set(measured) for measured in variants.values()))):
        if "in_cache" in name or name == "plain_add":
            continue
        rows.append([name.replace("_", " ")] + [f"{each[name].seconds() / each['plain_add'].seconds():.2f}"
                                                for each in variants.values()])
    plain = [seconds(each["plain_add"].seconds()) for each in variants.values()]
    return grid(["multiples of a += g, ResNet-50", *variants], [["a += g itself", *plain], *rows])


def compile_cost(measured: dict) -> str:
    compilers = list(measured)
    rows = [[name, *(f"{measured[compiler][name]['seconds']:.2f} s, {measured[compiler][name]['bytes']:,}"
                     for compiler in compilers)] for name in measured[compilers[0]]]
    return grid(["to compile, -O2; bytes in the object", *compilers], rows)


def hard_models(measured: dict[str, Benchmark]) -> str:
    names = list(dict.fromkeys(name.partition("/")[2] for name in measured))
    titles = METHODS | {"lamina_fragments": "lamina, fragments of 4,096"}
    rows = []
    for model in dict.fromkeys(name.partition("/")[0] for name in measured):
        row = [HARD_MODELS.get(model, model.replace("_", " "))]
        for name in names:
            counters = measured[f"{model}/{name}"].counters
            row.append(f"{counters['sent_percent']:.1f} %, {counters['relative_error']:.2f}")
        rows.append(row)
    return grid(["the model's layers", *(titles[name] for name in names)], rows)


def instructions(measured: dict) -> str:
    rows = [[name, *(f"{counted:.2f}" for counted in functions.values())] for name, functions in measured.items()]
    return grid(["instructions an element", *(name.replace("_", " ") for name in next(iter(measured.values())))], rows)


QUESTIONS = {"threshold_search": "Algorithm 1 over L layers", "element_threshold": "A threshold over layers or over elements",
             "methods": "A worker's step and what the receiver has", "hard_models": "Where layers say little",
             "codec": "Frames", "bounded": "Packets, and commits of what has arrived", "server": "The server's pass",
             "scaling": "Elements, layers, threads"}


def tables(results: Results, more: dict) -> dict[str, str]:
    """Title and table for each question that was measured."""
    found = {}
    if any(name.startswith("worker_step") for name in results):
        found["The pass of a worker at each instruction set, at -O3 and -O2"] = worker_step(results)
    for program, title in QUESTIONS.items():
        if program in results:
            measured = widest(results, program) if program == "methods" else program
            at = f", {variant_title(variant(measured))}" if measured != program else ""
            found[title + at] = globals()[program](results[measured])
    if "compile_cost" in more:
        found["Compiling"] = compile_cost(more["compile_cost"])
    if more.get("instructions"):
        found["Instructions"] = instructions(more["instructions"])
    return found


def about(environment: dict) -> list[str]:
    flags = " and ".join(sorted(set(environment["flags"].values()), key=len))
    return [f"{environment['cpu']}, {environment['cores']} cores, {environment['caches']}, {environment['memory_gib']} GiB, "
            f"{environment['system']}", f"{environment['compiler']}, {flags}; commit {environment['commit']}, "
            f"{environment['date'][:10]}"]


def text(environment: dict, results: Results, more: dict) -> str:
    """The machine, and all tables under their titles."""
    parts = ["\n".join(about(environment))] + [f"## {title}\n\n{table}" for title, table in tables(results, more).items()]
    return "\n\n".join(parts) + "\n"
