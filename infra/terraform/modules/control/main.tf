variable "name" {
  type        = string
  description = "Prefix of all names."
}

variable "region" {
  type        = string
  description = "The home region."
}

variable "vpc_id" {
  type        = string
  description = "The home region's network."
}

variable "public_subnets" {
  type        = list(string)
  description = "Of the load balancer."
}

variable "private_subnets" {
  type        = list(string)
  description = "Of the control machine (the first) and the database."
}

variable "gateway_ingress_cidrs" {
  type        = list(string)
  description = "Who may reach the gateway."
}

variable "certificate_arn" {
  type        = string
  description = "The gateway's certificate."
}

variable "ami" {
  type        = string
  description = "Image of the control machine."
}

variable "instance_type" {
  type        = string
  description = "Type of the control machine."
}

variable "address" {
  type        = string
  description = "Private address of the control machine."
}

variable "profile" {
  type        = string
  description = "Instance profile with the flow role."
}

variable "fleet_cidrs" {
  type        = list(string)
  description = "Addresses of all of the fleet's networks."
}

variable "log_bucket" {
  type        = string
  description = "Bucket for the load balancer's access logs."
}

variable "key_arn" {
  type        = string
  description = "Key of the database and its secret."
}

variable "store" {
  type        = string
  description = "CORAL_STORE."
}

variable "coral_version" {
  type        = string
  description = "Version of coral-serve to install."
}

locals {
  gateway_port = 8000
  agent_port   = 5600
}

# ---- The only public door: TLS on 443, to the gateway.
resource "aws_security_group" "gateway" {
  region      = var.region
  name_prefix = "${var.name}-gateway-"
  description = "The load balancer: 443 from outside, the gateway's port to the control machine."
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-gateway" }
}

resource "aws_vpc_security_group_ingress_rule" "gateway" {
  for_each          = toset(var.gateway_ingress_cidrs)
  region            = var.region
  security_group_id = aws_security_group.gateway.id
  description       = "OpenAI API over TLS."
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_egress_rule" "gateway" {
  region                       = var.region
  security_group_id            = aws_security_group.gateway.id
  description                  = "To the gateway."
  referenced_security_group_id = aws_security_group.control.id
  ip_protocol                  = "tcp"
  from_port                    = local.gateway_port
  to_port                      = local.gateway_port
}

resource "aws_lb" "gateway" {
  region                     = var.region
  name                       = "${var.name}-gateway"
  internal                   = false
  load_balancer_type         = "application"
  subnets                    = var.public_subnets
  security_groups            = [aws_security_group.gateway.id]
  drop_invalid_header_fields = true
  enable_deletion_protection = true
  # A generation may be silent for longer than the default minute.
  idle_timeout = 900
  access_logs {
    bucket  = var.log_bucket
    prefix  = "gateway"
    enabled = true
  }
}

resource "aws_lb_target_group" "gateway" {
  region               = var.region
  name                 = "${var.name}-gateway"
  vpc_id               = var.vpc_id
  port                 = local.gateway_port
  protocol             = "HTTP"
  target_type          = "instance"
  deregistration_delay = 300
  health_check {
    path                = "/health"
    matcher             = "200"
    interval            = 10
    healthy_threshold   = 2
    unhealthy_threshold = 3
  }
}

resource "aws_lb_target_group_attachment" "gateway" {
  region           = var.region
  target_group_arn = aws_lb_target_group.gateway.arn
  target_id        = aws_instance.control.id
}

resource "aws_lb_listener" "gateway" {
  region            = var.region
  load_balancer_arn = aws_lb.gateway.arn
  port              = 443
  protocol          = "HTTPS"
  certificate_arn   = var.certificate_arn
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.gateway.arn
  }
}

# ---- The control machine: Prefect server and worker, Ray head, coordinator and gateway. Reached by Session Manager.
resource "aws_security_group" "control" {
  region      = var.region
  name_prefix = "${var.name}-control-"
  description = "The control machine: the gateway's port from the load balancer, the agents' port from the fleet."
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-control" }
}

resource "aws_vpc_security_group_ingress_rule" "control_gateway" {
  region                       = var.region
  security_group_id            = aws_security_group.control.id
  description                  = "Requests."
  referenced_security_group_id = aws_security_group.gateway.id
  ip_protocol                  = "tcp"
  from_port                    = local.gateway_port
  to_port                      = local.gateway_port
}

resource "aws_vpc_security_group_ingress_rule" "control_agents" {
  for_each          = toset(var.fleet_cidrs)
  region            = var.region
  security_group_id = aws_security_group.control.id
  description       = "Node agents (ZeroMQ, CURVE keys)."
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = local.agent_port
  to_port           = local.agent_port
}

resource "aws_vpc_security_group_egress_rule" "control_out" {
  region            = var.region
  security_group_id = aws_security_group.control.id
  description       = "AWS's interfaces and packages."
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_egress_rule" "control_fleet" {
  for_each          = toset(var.fleet_cidrs)
  region            = var.region
  security_group_id = aws_security_group.control.id
  description       = "Engines and the database."
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 1024
  to_port           = 65535
}

resource "aws_instance" "control" {
  region                  = var.region
  ami                     = var.ami
  instance_type           = var.instance_type
  subnet_id               = var.private_subnets[0]
  private_ip              = var.address
  vpc_security_group_ids  = [aws_security_group.control.id]
  iam_instance_profile    = var.profile
  disable_api_termination = true
  ebs_optimized           = true
  monitoring              = true
  tags                    = { Name = "${var.name}-control" }

  user_data = templatefile("${path.module}/../../../cloud-init/control.yaml", {
    store         = var.store
    home_region   = var.region
    coral_version = var.coral_version
    database_host = aws_db_instance.prefect.address
    database_name = aws_db_instance.prefect.db_name
    secret_arn    = aws_db_instance.prefect.master_user_secret[0].secret_arn
  })

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    encrypted   = true
    kms_key_id  = var.key_arn
    volume_type = "gp3"
    volume_size = 100
  }
}

# ---- Prefect's database. SQLite locks up under several workers.
resource "aws_db_subnet_group" "prefect" {
  region      = var.region
  name_prefix = "${var.name}-prefect-"
  subnet_ids  = var.private_subnets
}

resource "aws_security_group" "database" {
  region      = var.region
  name_prefix = "${var.name}-database-"
  description = "Postgres from the control machine."
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-database" }
}

resource "aws_vpc_security_group_ingress_rule" "database" {
  region                       = var.region
  security_group_id            = aws_security_group.database.id
  description                  = "Postgres."
  referenced_security_group_id = aws_security_group.control.id
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
}

resource "aws_db_parameter_group" "prefect" {
  region      = var.region
  name_prefix = "${var.name}-prefect-"
  family      = "postgres17"
  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }
  parameter {
    name  = "log_statement"
    value = "ddl"
  }
  parameter {
    name  = "log_min_duration_statement"
    value = "1000"
  }
}

resource "aws_db_instance" "prefect" {
  region                              = var.region
  identifier_prefix                   = "${var.name}-prefect-"
  engine                              = "postgres"
  engine_version                      = "17"
  instance_class                      = "db.t4g.medium"
  allocated_storage                   = 20
  max_allocated_storage               = 200
  db_name                             = "prefect"
  username                            = "prefect"
  manage_master_user_password         = true
  master_user_secret_kms_key_id       = var.key_arn
  storage_encrypted                   = true
  kms_key_id                          = var.key_arn
  multi_az                            = true
  db_subnet_group_name                = aws_db_subnet_group.prefect.name
  parameter_group_name                = aws_db_parameter_group.prefect.name
  vpc_security_group_ids              = [aws_security_group.database.id]
  publicly_accessible                 = false
  backup_retention_period             = 14
  copy_tags_to_snapshot               = true
  deletion_protection                 = true
  auto_minor_version_upgrade          = true
  enabled_cloudwatch_logs_exports     = ["postgresql", "upgrade"]
  iam_database_authentication_enabled = true
  performance_insights_enabled        = true
  performance_insights_kms_key_id     = var.key_arn
  monitoring_interval                 = 60
  monitoring_role_arn                 = aws_iam_role.database_monitoring.arn
  skip_final_snapshot                 = false
  final_snapshot_identifier           = "${var.name}-prefect-final"
}

data "aws_iam_policy_document" "monitoring_assumes" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["monitoring.rds.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "database_monitoring" {
  name               = "${var.name}-database-monitoring"
  assume_role_policy = data.aws_iam_policy_document.monitoring_assumes.json
}

resource "aws_iam_role_policy_attachment" "database_monitoring" {
  role       = aws_iam_role.database_monitoring.name
  policy_arn = "arn:aws:iam::aws:policy/service-role/AmazonRDSEnhancedMonitoringRole"
}

output "gateway_dns_name" {
  value = aws_lb.gateway.dns_name
}

output "instance_id" {
  value = aws_instance.control.id
}

output "database_secret_arn" {
  value = aws_db_instance.prefect.master_user_secret[0].secret_arn
}
