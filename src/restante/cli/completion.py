"""`restante completion`: let the shell complete our commands and flags."""

from typing import Literal

from cyclopts import App, Group


def register(app: App, group: Group) -> None:
    """Add the command."""

    def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
        """
        Print what makes a shell complete the words of this command.

        Example: restante completion bash > ~/.local/share/bash-completion/completions/restante

        Parameters
        ----------
        shell
            Which shell. For zsh put the output into a file named _restante in your fpath, for fish
            into ~/.config/fish/completions/restante.fish.
        """
        print(app.generate_completion(shell=shell))

    app.command(completion, group=group)
