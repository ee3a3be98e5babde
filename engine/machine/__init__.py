"""What this machine is and can do: processors, memory bandwidth, datasheets, the roofline."""
