from ldpfl_verify.command_line import main

main()
