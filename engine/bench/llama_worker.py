"""Times llama.cpp for `flint bench compare`. Runs by path under any Python: standard library and llama_cpp only.

Without arguments through llama-cpp-python; with the path of a llama-bench binary through that (no tokens then).
"""

import json
import os
import subprocess
import sys
import time


def main():
    request = json.loads(sys.stdin.read())
    answer_to = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints is no answer
    try:
        answer = llama_bench(sys.argv[1], request) if len(sys.argv) > 1 else llama_cpp_python(request)
    except ImportError as error:
        answer = {"missing": f"{sys.executable.rsplit(os.sep, 1)[-1]} cannot import llama_cpp: {error}"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(answer_to, "w") as out:
        out.write(json.dumps(answer) + "\n")


def llama_cpp_python(request):
    import ctypes

    import llama_cpp  # pyright: ignore[reportMissingImports]

    prompt, count = request["prompt"], request["tokens"]
    on_gpu = bool(request.get("gpu")) and llama_cpp.llama_supports_gpu_offload()  # a CPU build stays on the CPU
    llm = llama_cpp.Llama(
        request["gguf"],
        n_ctx=request["context"],
        n_batch=min(512, request["context"]),
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        n_gpu_layers=-1 if on_gpu else 0,
        flash_attn=True,  # its best setting; the default is off
        verbose=False,
    )
    vocabulary = llm.n_vocab()

    def best():
        logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        row = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * vocabulary)).contents
        return int(np.frombuffer(row, dtype=np.float32).argmax())

    import numpy as np

    llm.eval(prompt[:8])
    best()
    llm.eval([prompt[8] if len(prompt) > 8 else prompt[0]])
    llm.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
    start = time.perf_counter()
    llm.eval(prompt)
    ids = [best()]
    first = time.perf_counter()
    while len(ids) < count:
        llm.eval([ids[-1]])
        ids.append(best())
    end = time.perf_counter()
    features = llama_cpp.llama_print_system_info().decode().strip()
    return {
        "ids": ids,
        "prefill_s": first - start,
        "decode_s": end - first,
        "device": f"llama.cpp, {'GPU' if on_gpu else str(request['threads']) + ' threads'}",
        "gpu": on_gpu,
        "features": features,
        "versions": {"llama_cpp_python": llama_cpp.__version__},
    }


def llama_bench(binary, request):
    count = request["tokens"] - 1
    command = [binary, "-m", request["gguf"], "-p", str(len(request["prompt"])), "-n", str(count), "-r", "1"]
    command += ["-t", str(request["threads"]), "-o", "json"] + ([] if request.get("gpu") else ["-ngl", "0"])
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=800).stdout)
    prefill = next(row for row in rows if row["n_gen"] == 0)
    decode = next(row for row in rows if row["n_prompt"] == 0)
    return {
        "prefill_s": prefill["avg_ns"] / 1e9,
        "decode_s": decode["avg_ns"] / 1e9,
        "device": f"{decode.get('backends', 'llama.cpp')}, {request['threads']} threads",
        "gpu": "CUDA" in str(decode.get("backends", "")),
        "versions": {"llama.cpp": f"{decode.get('build_commit', '?')} ({decode.get('build_number', '?')})"},
    }


if __name__ == "__main__":
    main()
