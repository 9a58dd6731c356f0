"""HST112: a device tensor is handed to NumPy."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line


class NumpyOnDeviceTensor(Rule):
    """`.numpy()` of a tensor that is on the device.

    ## What it does

    Finds `.numpy()`, `np.array(...)` and `np.asarray(...)` of tensors that surely lie on the
    device.

    ## Why is this bad?

    NumPy lives in host memory: "can't convert cuda:0 device type tensor to numpy".

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(3, device=device)
    array = x.numpy()
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(3, device=device)
    array = x.cpu().numpy()
    ```

    ## Fix safety

    Safe.
    """

    code = "HST112"

    def check(self, file: File) -> Iterator[Finding]:
        """Device tensors that go to NumPy."""
        return first_of_each_line(
            self.finding(
                file, seen.node,
                f"`{file.short(seen.node)}` is of a tensor on the device; NumPy"
                " cannot read it there.",
                "copy it to the host first: .cpu().numpy()",
                severity="warning" if seen.assumed else "error",
            )
            for seen in file.facts.all("numpy")
        )  # fmt: skip
