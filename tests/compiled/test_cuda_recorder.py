"""Recording in CUDA graphs, over the stand-in driver, where copies are copies, and kernels are only seen."""

from __future__ import annotations


def test_a_capture_holds_one_copy_a_layer_and_takes_no_memory(standin):
    ran = standin.run("""
        from pathlib import Path
        from sglang_uvm_offload.expert_location import ExpertLocation
        from sglang_uvm_offload.routing.recorder import Recorder
        from sglang_uvm_offload.routing.counts import IdFormat
        recorder = Recorder(Path("trace.npz"), [ExpertLocation.trivial(16, range(16))] * 2, 4, 8, "cuda")
        ids = torch.zeros(3, 5, dtype=torch.int32, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for layer, id_format in enumerate(IdFormat):
                recorder.record(layer, ids[:, :4], id_format)
    """)
    assert ran.code == 0, ran.err
    names = [call["call"] for call in ran.calls]
    captured = ran.calls[names.index("cudaStreamBeginCapture") + 1 : names.index("cudaStreamEndCapture")]
    assert [call["call"] for call in captured] == ["cudaLaunchKernel"] * 2
    assert all("direct_copy_kernel_cuda" in call["kernel"] for call in captured)


def test_guesses_are_captured_as_one_copy_too(standin):
    ran = standin.run("""
        from pathlib import Path
        from sglang_uvm_offload.expert_location import ExpertLocation
        from sglang_uvm_offload.routing.recorder import Guessing, Recorder
        guessing = Guessing(np.zeros((2, 2), dtype=bool), 5)
        where = [ExpertLocation.trivial(16, range(16))] * 2
        recorder = Recorder(Path("trace.npz"), where, 4, 8, "cuda", guessing=guessing)
        guessed = torch.zeros(3, 5, dtype=torch.int64, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            recorder.record_guess(1, 1, guessed)
    """)
    assert ran.code == 0, ran.err
    names = [call["call"] for call in ran.calls]
    (call,) = ran.calls[names.index("cudaStreamBeginCapture") + 1 : names.index("cudaStreamEndCapture")]
    assert call["call"] == "cudaLaunchKernel"
    assert "direct_copy_kernel_cuda" in call["kernel"]


def test_each_replay_records_what_it_computed(standin):
    ran = standin.run("""
        from pathlib import Path
        from sglang_uvm_offload.expert_location import ExpertLocation
        from sglang_uvm_offload.routing.recorder import Recorder
        from sglang_uvm_offload.routing.counts import IdFormat
        recorder = Recorder(Path("trace.npz"), [ExpertLocation.trivial(16, range(16))], 4, 8, "cuda")
        ids = torch.zeros(3, 4, dtype=torch.int16, device="cuda")  # no conversion: a copy that the stand-in makes
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorder.record(0, ids, IdFormat.PLAIN)
        for length in range(7):
            ids.copy_(on_device(np.full((3, 4), length, dtype=np.int16)))
            graph.replay()
            recorder.end_step(["a", "b"], [length, length])
        recorder.poll(wait=True)
        print(json.dumps([recorder.dropped_steps, recorder.log.trace(14).ids[:, 0, 0].tolist()]))
    """)
    assert ran.said == [0, [*range(7), *range(7)]], ran.err
