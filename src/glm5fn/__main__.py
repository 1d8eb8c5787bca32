from glm5fn.cli import main

raise SystemExit(main())
