"""What breaks first when a cloud tier grows: measured costs, AWS's limits, and a simulation over both."""
