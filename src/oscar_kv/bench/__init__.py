"""What the kernels take, beside what 16 bit takes in the same run. Needs neither typer nor rich."""
